"""How a server is given a version: it stands still, loads it in one of these ways, and goes on.

TensorWeights       buckets in shared memory, for a server that this process has started
CollectiveWeights   what rank 0 of the trainer broadcasts to the server's ranks
DiskWeights         a folder that the server sees
AdapterWeights      an adapter beside the one that it serves; see `adapters`
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from safetensors.torch import save_file

from areal_sc.config.schema import OnWeightUpdate, RolloutConfig
from areal_sc.engines.servers.server import ServerLife
from areal_sc.errors import ArealError, EngineFailed, ModelError, PeerLost, RpcTimeout
from areal_sc.weights.group import NamedTensor, in_byte_order, layout_of, split_into_buckets
from areal_sc.weights.published import BucketLayout

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource
    from areal_sc.engines.servers.client import ServerClient

logger = logging.getLogger(__name__)

NUM_BUFFERS: Final = 2
"""One is filled while the server loads from the other."""


@dataclass
class UpdateTimes:
    """Where the time of weight updates went; sums over updates.

    Attributes:
        update_open_s: until the weights were at hand; the server generates meanwhile.
        update_drain_s: waiting for running answers, with `finish_running`.
        update_pause_s: until the server stood still.
        update_load_s: loading.
        update_resume_s: naming the version and going on.
        update_stall_s: in which the server generated nothing.
        update_bytes: written for the server to load; 0 when it reads for itself.
    """

    update_open_s: float = 0.0
    update_drain_s: float = 0.0
    update_pause_s: float = 0.0
    update_load_s: float = 0.0
    update_resume_s: float = 0.0
    update_stall_s: float = 0.0
    update_bytes: float = 0.0


class VersionWeights:
    """Weights of one policy version."""

    version: int

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Gets them from where they are, for a `load` inside; raises what that raises."""
        return nullcontext()

    async def load_beside(self, server: ServerClient) -> None:
        """Before a `load`: gives the server what it can take beside what it serves.

        Raises: ModelError: no server can serve these weights. EngineFailed: this one does not.
        """

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        """Gives the paused server these weights.

        Raises: ArealError: it does not have them.
        """
        raise NotImplementedError


async def update_server(
    server: ServerLife,
    weights: VersionWeights,
    times: UpdateTimes,
    config: RolloutConfig,
    *,
    stays_paused: bool,
) -> None:
    """Gives a server weights, which are open.

    Broken off once the server stands still, or failed, the server is lost: what it has is not
    known.

    Args:
        stays_paused: the server was paused, and shall be afterwards.
    Raises: ModelError: the server cannot serve such weights, or refuses these. TransportError: it
        cannot be asked now. After both it goes on as it was. EngineFailed: it is lost.
    """
    clock = _Clock()
    try:
        await weights.load_beside(server.client)
    except EngineFailed as error:
        raise ModelError(f"version {weights.version} is refused: {error}") from error
    times.update_open_s += clock.lap()
    with server.needed_for(f"its weight update to version {weights.version}"):
        server.hold()
        if config.on_weight_update == OnWeightUpdate.finish_running and not stays_paused:
            await _drain(server, config.group_timeout_s)
        times.update_drain_s += clock.lap()
        standstill = _Clock()
        with server.updating():
            await server.pause()
            await server.wake()
            times.update_pause_s += clock.lap()
            await weights.load(server.client, times)
            times.update_load_s += clock.lap()
            await server.take_cache()
            await server.finish_update(weights.version)
            if not stays_paused:
                await server.resume()
            times.update_resume_s += clock.lap()
        times.update_stall_s += standstill.lap()
    if not stays_paused:
        server.open()


async def _drain(server: ServerLife, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await server.places.is_empty.wait()
    except TimeoutError:
        logger.warning(
            "%s still runs %d answers after %g s: they are interrupted",
            server.name,
            server.places.num_running,
            timeout_s,
        )


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before


class SharedBuckets:
    """Buffers in shared memory, of which a server of this machine loads buckets of bounded size.

    The bytes are written once, whatever the number of ranks, and not sent at all. The buffers grow
    to the largest bucket, and live until `close`.
    """

    def __init__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back, once the server maps it no more."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    async def fill(self, bucket: Sequence[NamedTensor], number: int) -> torch.Tensor:
        """[n] uint8 in shared memory: the bucket's bytes, in the order of its layout."""
        return await asyncio.to_thread(self._fill, bucket, number)

    def _fill(self, bucket: Sequence[NamedTensor], number: int) -> torch.Tensor:
        size = sum(tensor.nbytes for _, tensor in bucket)
        buffer = self._buffers[number % NUM_BUFFERS]
        if buffer.nbytes < size:
            self._buffers[number % NUM_BUFFERS] = buffer = _shared_bytes(size)
        start = 0
        for _, tensor in in_byte_order(bucket):
            end = start + tensor.nbytes
            buffer[start:end].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            start = end
        return buffer[:size]


@dataclass
class TensorWeights(VersionWeights):
    """Tensors of this process, for the server that it has started; through shared memory.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name; asked at each `opened`.
        bucket_bytes: shared memory that is filled at one time, and as much again meanwhile.
    """

    version: int
    source: TensorSource
    buckets: SharedBuckets
    bucket_bytes: int
    _in_buckets: Sequence[Sequence[NamedTensor]] = ()  # while it is open
    _fills: dict[int, asyncio.Task[torch.Tensor]] = field(default_factory=dict)  # by bucket

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        tensors = list(await self.source())
        self._in_buckets = list(split_into_buckets(tensors, self.bucket_bytes))
        try:
            for number in range(min(NUM_BUFFERS, len(self._in_buckets))):
                self._begin_fill(number)
                await self._fills[number]
            yield
        finally:
            await asyncio.gather(*self._fills.values(), return_exceptions=True)
            self._fills.clear()
            self._in_buckets = ()

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        """Every bucket is written once; its buffer is used again when the server has loaded it."""
        await server.begin_update()
        for number, bucket in enumerate(self._in_buckets):
            flat = await self._fills[number]
            del self._fills[number]
            is_last = number == len(self._in_buckets) - 1
            await server.load_tensors(flat, layout_of(bucket), drops_cache=is_last)
            times.update_bytes += flat.nbytes
            if number + NUM_BUFFERS < len(self._in_buckets):
                self._begin_fill(number + NUM_BUFFERS)
        await server.end_update()

    def _begin_fill(self, number: int) -> None:
        fill = self.buckets.fill(self._in_buckets[number], number)
        self._fills[number] = asyncio.create_task(fill)


@dataclass(frozen=True)
class DiskWeights(VersionWeights):
    """A Hugging Face folder on a path that the server sees."""

    version: int
    folder: Path

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        await server.load_from_disk(str(self.folder))


@dataclass(frozen=True)
class WrittenWeights(DiskWeights):
    """Tensors that are written to a folder when they are asked for, for a server that sees it.

    Attributes:
        folder: is made, and removed after the load.
        source: gives every parameter, shaped, under its Hugging Face name.
        model_folder: whose config the written folder gets.
    """

    source: TensorSource
    model_folder: Path

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        tensors = await self.source()
        try:
            await asyncio.to_thread(self._write, tensors)
            yield
        finally:
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def _write(self, tensors: Iterable[NamedTensor]) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.model_folder / "config.json", self.folder / "config.json")
            whole = {name: tensor.detach().contiguous() for name, tensor in tensors}
            save_file(whole, self.folder / "model.safetensors")
        except OSError as error:
            raise EngineFailed(f"weights could not be written to {self.folder}: {error}") from error


@dataclass(frozen=True)
class CollectiveWeights(VersionWeights):
    """Weights that a server of a weight group receives while rank 0 broadcasts them.

    A broadcast waits for all ranks of the group. So where this server's ranks do not take part,
    rank 0 is told, and the server gets the weights another way.

    Attributes:
        buckets: in the order in which they are broadcast.
        other_way: the same weights.
        give_up: tells rank 0 that not all ranks will take part.
    """

    version: int
    group_name: str
    buckets: Sequence[BucketLayout]
    other_way: VersionWeights
    give_up: Callable[[], Awaitable[None]]

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        if self.group_name in server.groups:
            try:
                return await self._receive(server)
            except ArealError as error:
                logger.warning("version=%d is loaded another way: %s", self.version, error)
                server.groups.discard(self.group_name)
                await self.give_up()
                if isinstance(error, PeerLost | RpcTimeout):  # it cannot be asked any more
                    raise
            with suppress(EngineFailed):  # it refuses to end an update that it has not begun
                await server.end_update()
        else:
            await self.give_up()
        async with self.other_way.opened():
            await self.other_way.load(server, times)

    async def _receive(self, server: ServerClient) -> None:
        await server.begin_update()
        for number, layout in enumerate(self.buckets, start=1):
            is_last = number == len(self.buckets)
            await server.receive_broadcast(self.group_name, layout, drops_cache=is_last)
        await server.end_update()


def _shared_bytes(size: int) -> torch.Tensor:
    """[size] uint8 in memory that other processes map by its name."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
