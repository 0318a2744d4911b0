"""One version of the weights, and the ways in which a paused server is given them."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

from areal_sc.engines.weight_group import NamedTensor
from areal_sc.errors import ArealError, EngineFailed, PeerLost, RpcTimeout
from areal_sc.weights import BucketLayout

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource
    from areal_sc.engines.servers.client import ServerClient

logger = logging.getLogger(__name__)


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
