"""One version of the weights, in a form that paused servers can be given, once or again later.

Each way answers for every server by itself: one that refuses or fails is an error in its place,
and the others go on.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PausedServer:
    """One life of a server, in which it generates nothing at the moment and is to get weights.

    Attributes:
        is_own: this process has started it, so it runs on this machine and with its rights.
        groups: names of the weight groups that it is in.
    """

    client: ServerClient
    is_own: bool
    groups: frozenset[str]


@dataclass
class LoadReport:
    """What became of one load.

    Attributes:
        errors: one for each server, None where it has the weights.
        num_bytes: that were written for the servers; 0 when they read for themselves.
        broken_group: a weight group that cannot be used any more.
    """

    errors: list[ArealError | None]
    num_bytes: int = 0
    broken_group: str | None = None


class LoadableWeights:
    """Weights that are at hand, so that a server stands still for their loading alone."""

    def prepared(self) -> AbstractAsyncContextManager[None]:
        """Around one `load`: does beforehand what can be done while servers still generate."""
        return nullcontext()

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """Gives the servers these weights. `timeout_s` bounds each step."""
        raise NotImplementedError


class Weights:
    """Weights of one policy version."""

    version: int

    @property
    def again(self) -> Weights:
        """What a server that starts later is given to have the same weights."""
        return self

    def opened(self) -> AbstractAsyncContextManager[LoadableWeights]:
        """Gets them from where they are; raises what that raises."""
        raise NotImplementedError


@dataclass(frozen=True)
class DiskWeights(Weights, LoadableWeights):
    """A Hugging Face folder on a path that the servers see.

    It has to stay until the version after it has been published: a server that restarts reads it.
    """

    version: int
    folder: str

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        yield self

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        async def load_one(server: PausedServer) -> None:
            await server.client.load_from_disk(self.folder, timeout_s=timeout_s)

        return LoadReport(await for_each(servers, load_one))


@dataclass(frozen=True)
class WrittenWeights(Weights):
    """Tensors that are written to a folder when they are asked for, for servers that see it.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name.
        folder: is made, and removed after the load.
        model_folder: whose config the written folder gets.
    """

    version: int
    source: TensorSource
    folder: Path
    model_folder: Path

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        tensors = await self.source()
        try:
            await asyncio.to_thread(self._write, tensors)
            yield DiskWeights(self.version, str(self.folder))
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
class CollectiveWeights(Weights, LoadableWeights):
    """Weights that the servers of a weight group receive while rank 0 broadcasts them.

    A broadcast waits for all ranks, so no server is asked to take part before all of them have
    opened their update. A server that refuses is known by its answer; rank 0 is told then, so that
    it does not wait for ranks that will not come, and all servers get the weights another way.

    Attributes:
        group_name: of the group.
        num_members: servers that have joined it; those that have restarted since are in it no more.
        buckets: in the order in which they are broadcast.
        other_way: the same weights.
        give_up: tells rank 0 that not all ranks will take part.
    """

    version: int
    group_name: str
    num_members: int
    buckets: Sequence[BucketLayout]
    other_way: Weights
    give_up: Callable[[], Awaitable[None]]

    @property
    def again(self) -> Weights:
        return self.other_way

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        yield self

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """After a broadcast that failed, the servers that are left load `other_way`.

        One member that is missing fails it: all ranks of a group take part, or none can.
        """
        members = [server for server in servers if self.group_name in server.groups]
        errors: dict[PausedServer, ArealError | None] = {}
        if self.num_members == len(members) == len(servers):
            errors = dict(zip(members, await self._receive(members, timeout_s), strict=True))
        else:
            await self.give_up()
        is_broken = not errors or any(errors.values())
        outside = [
            server
            for server in servers
            if server not in errors or (is_broken and not isinstance(errors[server], _LOST))
        ]
        if any(errors.values()):
            # whoever is not in an update any more says so, which is no failure
            await for_each(outside, lambda s: s.client.end_update(timeout_s=timeout_s))
        late = LoadReport([])
        if outside:
            async with self.other_way.opened() as weights, weights.prepared():
                late = await weights.load(outside, timeout_s=timeout_s)
        errors |= dict(zip(outside, late.errors, strict=True))
        return LoadReport(
            [errors[server] for server in servers],
            late.num_bytes,
            broken_group=self.group_name if is_broken else None,
        )

    async def _receive(
        self, servers: Sequence[PausedServer], timeout_s: float
    ) -> list[ArealError | None]:
        errors = await for_each(servers, lambda server: server.client.begin_update())
        for number, layout in enumerate(self.buckets):
            if any(errors):
                await self.give_up()
                return errors
            is_last = number == len(self.buckets) - 1
            errors = await self._receive_bucket(servers, layout, is_last, timeout_s)
        if any(errors):
            return errors
        return await for_each(servers, lambda s: s.client.end_update(timeout_s=timeout_s))

    async def _receive_bucket(
        self, servers: Sequence[PausedServer], layout: BucketLayout, is_last: bool, timeout_s: float
    ) -> list[ArealError | None]:
        """When one does not take part, those that then wait for it are given up, too."""

        async def receive(server: PausedServer) -> None:
            await server.client.receive_broadcast(
                self.group_name, layout, drops_cache=is_last, timeout_s=timeout_s
            )

        tasks = [asyncio.create_task(receive(server)) for server in servers]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if any(task.done() and task.exception() for task in tasks):
                await self.give_up()
                if waiting:
                    _, waiting = await asyncio.wait(waiting, timeout=GRACE_S)
        finally:
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        errors: list[ArealError | None] = []
        for server, outcome in zip(servers, outcomes, strict=True):
            if isinstance(outcome, asyncio.CancelledError):
                errors.append(
                    PeerLost(f"{server.client.url} waits in a broadcast that was given up")
                )
            elif outcome is None or isinstance(outcome, ArealError):
                errors.append(outcome)
            else:
                raise outcome
        return errors


async def for_each(
    servers: Sequence[S],
    action: Callable[[S], Awaitable[None]],
    errors: Sequence[ArealError | None] | None = None,
) -> list[ArealError | None]:
    """Runs an action on all servers at once, leaving out those that have an error already."""

    async def run(server: S, error: ArealError | None) -> ArealError | None:
        if error is not None:
            return error
        try:
            await action(server)
        except ArealError as failure:
            return failure
        return None

    before = errors or [None] * len(servers)
    return list(await asyncio.gather(*map(run, servers, before)))
