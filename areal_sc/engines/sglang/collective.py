"""Weights by SGLang's weight-update group: rank 0 broadcasts, every rank of every server receives.

A broadcast waits for all ranks, so no server is asked to take part before all of them have opened
their update. A server that refuses is known by its answer; rank 0 is told then, so that it does
not wait for ranks that will not come, and all servers get the weights another way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from areal_sc.engines.sglang.weights import (
    LoadableWeights,
    LoadReport,
    PausedServer,
    Weights,
    begin_update,
    end_update,
    for_each,
)
from areal_sc.errors import ArealError, PeerLost, RpcTimeout
from areal_sc.weights import BucketLayout, WeightGroup

GRACE_S = 10.0
"""For the other servers to end a broadcast that one of them did not take part in."""


@dataclass(frozen=True)
class CollectiveWeights:
    """Weights that the servers of a group receive while rank 0 broadcasts them.

    Attributes:
        group_name: of the group.
        num_members: servers that have joined it; those that have restarted since are in it no more.
        buckets: in the order in which they are broadcast.
        again: the same weights another way.
        give_up: tells rank 0 that not all ranks will take part.
    """

    version: int
    group_name: str
    num_members: int
    buckets: Sequence[BucketLayout]
    again: Weights
    give_up: Callable[[], Awaitable[None]]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        yield self

    def prepared(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """After a broadcast that failed, the servers that are left load `again`.

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
            if server not in errors or (is_broken and not _is_lost(errors[server]))
        ]
        if any(errors.values()):
            # whoever is not in an update any more says so, which is no failure
            await for_each(outside, lambda server: end_update(server, timeout_s))
        late = LoadReport([])
        if outside:
            async with self.again.opened() as weights, weights.prepared():
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
        errors = await for_each(servers, begin_update)
        for number, layout in enumerate(self.buckets):
            if any(errors):
                await self.give_up()
                return errors
            request = bucket_request(layout, self.group_name)
            request["flush_cache"] = number == len(self.buckets) - 1
            errors = await self._receive_bucket(servers, request, timeout_s)
        if any(errors):
            return errors
        return await for_each(servers, lambda server: end_update(server, timeout_s))

    async def _receive_bucket(
        self, servers: Sequence[PausedServer], request: dict[str, Any], timeout_s: float
    ) -> list[ArealError | None]:
        """When one does not take part, those that then wait for it are given up, too."""

        async def receive(server: PausedServer) -> None:
            await server.client.receive_broadcast(request, timeout_s=timeout_s)

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
                url = server.client.url
                errors.append(PeerLost(f"{url} waits in a broadcast that was given up"))
            elif outcome is None or isinstance(outcome, ArealError):
                errors.append(outcome)
            else:
                raise outcome
        return errors


def group_request(group: WeightGroup, first_rank: int) -> dict[str, Any]:
    """What a server is told to join; its ranks are counted from `first_rank`."""
    return {
        "group_name": group.name,
        "master_address": group.master_address,
        "master_port": group.master_port,
        "world_size": group.world_size,
        "rank_offset": first_rank,
        "backend": group.backend,
    }


def bucket_request(layout: BucketLayout, group_name: str) -> dict[str, Any]:
    """What a server is told to take part in one broadcast."""
    return {
        "group_name": group_name,
        "names": list(layout.names),
        "dtypes": list(layout.dtypes),
        "shapes": [list(shape) for shape in layout.shapes],
    }


def _is_lost(error: ArealError | None) -> bool:
    """Whether the server cannot be asked anything any more, as opposed to having refused."""
    return isinstance(error, PeerLost | RpcTimeout)
