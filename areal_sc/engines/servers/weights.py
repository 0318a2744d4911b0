"""One version of the weights, which paused servers are given, once or again later.

Each way answers for every server by itself: one that refuses or fails is an error in its place,
and the others go on.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors.torch import save_file

from areal_sc.engines.weight_group import NamedTensor
from areal_sc.errors import ArealError, EngineFailed, PeerLost, RpcTimeout
from areal_sc.weights import BucketLayout

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource
    from areal_sc.engines.servers.client import ServerClient

S = TypeVar("S")

_LOST = (PeerLost, RpcTimeout)
"""Errors of a server that cannot be asked anything any more, as opposed to having refused."""

GRACE_S = 10.0
"""For the other servers to end a broadcast that one of them did not take part in."""


@dataclass
class UpdateTimes:
    """Where the time of weight updates went; sums over updates.

    Attributes:
        update_open_s: until the weights were at hand; the servers generate meanwhile.
        update_drain_s: waiting for running answers, with `finish_running`.
        update_pause_s: until the servers of a wave stood still.
        update_load_s: loading.
        update_resume_s: naming the version and going on.
        update_stall_s: in which a server generated nothing, summed over servers.
        update_bytes: written for servers to load; 0 when they read for themselves.
        updated_servers, failed_servers: server updates that succeeded, and that failed.
    """

    update_open_s: float = 0.0
    update_drain_s: float = 0.0
    update_pause_s: float = 0.0
    update_load_s: float = 0.0
    update_resume_s: float = 0.0
    update_stall_s: float = 0.0
    update_bytes: float = 0.0
    updated_servers: float = 0.0
    failed_servers: float = 0.0


class VersionWeights:
    """Weights of one policy version."""

    version: int

    @property
    def again(self) -> VersionWeights:
        """What a server that starts later is given to have the same weights."""
        return self

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Gets them from where they are, for the `load`s inside; raises what that raises."""
        return nullcontext()

    async def prepare(self) -> None:
        """Before a `load`: does what can be done while the servers still generate."""

    async def load_beside(self, server: ServerClient) -> None:
        """Then: gives a server what it can take beside what it serves.

        Raises: ModelError: no server can serve these weights. EngineFailed: this one does not.
        """

    async def load(
        self, servers: Sequence[ServerClient], times: UpdateTimes
    ) -> dict[ServerClient, ArealError]:
        """Gives paused servers these weights; returns those that do not have them, and why."""
        raise NotImplementedError


@dataclass(frozen=True)
class DiskWeights(VersionWeights):
    """A Hugging Face folder on a path that the servers see.

    It has to stay until the version after it has been published: a server that restarts reads it.
    """

    version: int
    folder: Path

    async def load(
        self, servers: Sequence[ServerClient], times: UpdateTimes
    ) -> dict[ServerClient, ArealError]:
        failed: dict[ServerClient, ArealError] = {}
        folder = str(self.folder)
        await for_each(servers, lambda s: s.load_from_disk(folder), failed)
        return failed


@dataclass(frozen=True)
class WrittenWeights(DiskWeights):
    """Tensors that are written to a folder when they are asked for, for servers that see it.

    Attributes:
        folder: is made, and removed after the load.
        source: gives every parameter, shaped, under its Hugging Face name.
        model_folder: whose config the written folder gets.
    """

    source: TensorSource
    model_folder: Path
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        async with self._turn:
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
    """Weights that the servers of a weight group receive while rank 0 broadcasts them.

    A broadcast waits for all ranks, so no server is asked to take part before all of them have
    opened their update. A server that refuses is known by its answer; rank 0 is told then, so that
    it does not wait for ranks that will not come, and all servers get the weights another way.

    Attributes:
        num_members: servers that have joined the group; one that has restarted has left it.
        buckets: in the order in which they are broadcast.
        other_way: the same weights.
        give_up: tells rank 0 that not all ranks will take part.
    """

    version: int
    group_name: str
    num_members: int
    buckets: Sequence[BucketLayout]
    other_way: VersionWeights
    give_up: Callable[[], Awaitable[None]]

    @property
    def again(self) -> VersionWeights:
        return self.other_way

    async def load(
        self, servers: Sequence[ServerClient], times: UpdateTimes
    ) -> dict[ServerClient, ArealError]:
        """After a broadcast that failed, the servers that lack something load `other_way`.

        One member that is missing fails it: all ranks of a group take part, or none can.
        """
        failed: dict[ServerClient, ArealError] = {}
        done: list[ServerClient] = []
        members = [server for server in servers if self.group_name in server.groups]
        if self.num_members == len(members) == len(servers):
            done = await self._receive(members, failed)
            if not failed:
                return {}
        else:
            await self.give_up()
        left = [s for s in servers if s not in done and not isinstance(failed.get(s), _LOST)]
        if failed:
            # a server that has no update open refuses to end it, which is no failure
            await for_each(left, lambda s: s.end_update(), {})
        for server in servers:
            server.groups.discard(self.group_name)
        lost = {server: error for server, error in failed.items() if server not in left}
        if not left:
            return lost
        async with self.other_way.opened():
            await self.other_way.prepare()
            return lost | await self.other_way.load(left, times)

    async def _receive(
        self, servers: Sequence[ServerClient], failed: dict[ServerClient, ArealError]
    ) -> list[ServerClient]:
        """Returns those that have all of it; adds to `failed`."""
        await for_each(servers, lambda server: server.begin_update(), failed)
        for number, layout in enumerate(self.buckets):
            if failed:
                await self.give_up()
                return []
            is_last = number == len(self.buckets) - 1
            failed |= await self._receive_bucket(servers, layout, is_last)
        if failed:
            return []
        await for_each(servers, lambda s: s.end_update(), failed)
        return [server for server in servers if server not in failed]

    async def _receive_bucket(
        self, servers: Sequence[ServerClient], layout: BucketLayout, is_last: bool
    ) -> dict[ServerClient, ArealError]:
        """When one does not take part, those that then wait for it are given up, too."""
        tasks = {
            server: asyncio.ensure_future(
                server.receive_broadcast(self.group_name, layout, drops_cache=is_last)
            )
            for server in servers
        }
        try:
            _, waiting = await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks.values()):
                await self.give_up()
                if waiting:
                    await asyncio.wait(waiting, timeout=GRACE_S)
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
        failed: dict[ServerClient, ArealError] = {}
        for server, task in tasks.items():
            try:
                task.result()
            except asyncio.CancelledError:
                failed[server] = PeerLost(f"{server.url} waits in a broadcast that was given up")
            except ArealError as error:
                failed[server] = error
        return failed


async def for_each(
    servers: Iterable[S], action: Callable[[S], Awaitable[None]], failed: dict[S, ArealError]
) -> None:
    """Runs an action on all servers at once, but not on those in `failed`; adds to these."""

    async def run(server: S) -> None:
        try:
            await action(server)
        except ArealError as error:
            failed[server] = error

    await asyncio.gather(*(run(server) for server in servers if server not in failed))
