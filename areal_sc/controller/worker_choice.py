"""Which rollout worker takes the next group, and the groups that wait for one.

consumes     groups, each with the oldest policy version that it may start on
waits for    a worker that holds that version and has room
unblocked by every change that `Background` tells of: a weight update, a group's end, a sweep

A step hands hundreds of groups to thousands of workers. So the workers' counts lie in arrays that
are compared at once, and one task serves all groups: if each looked for itself, every change would
wake hundreds of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from areal_sc.controller.background import Background

GROUPS_PER_TURN: Final = 32
"""So many groups get a worker in one turn of the event loop; that takes some milliseconds."""


class WorkerLoads:
    """Counts of groups, by the worker's number: its place in the list of all.

    Args:
        nodes: each worker's node.
        max_on_worker: groups that one store holds.
        max_on_node: node -> groups that its stores hold together.

    Attributes:
        num_stored: groups that take room in a store, on all workers together: running ones, and
            those whose rows lie there.
        max_groups: that all stores hold.
    """

    def __init__(
        self, nodes: Sequence[str], max_on_worker: int, max_on_node: Mapping[str, int]
    ) -> None:
        self.num_stored = 0
        self.max_groups = sum(max_on_node.values())
        number = {node: i for i, node in enumerate(max_on_node)}
        self._node = np.array([number[node] for node in nodes], np.intp)
        self._max_on_worker = max_on_worker
        self._max_on_node = np.array(list(max_on_node.values()), np.int64)
        self._on_node = np.zeros(len(number), np.int64)
        self._version, self._running, self._held, self._promised = np.zeros(
            (4, len(nodes)), np.int64
        )

    def note(self, worker: int, *, version: int, num_running: int, num_held: int) -> None:
        """The worker's counts are these now."""
        num_new = num_running + num_held - int(self._running[worker] + self._held[worker])
        self._on_node[self._node[worker]] += num_new
        self.num_stored += num_new
        self._version[worker] = version
        self._running[worker] = num_running
        self._held[worker] = num_held

    def promise(self, worker: int, num_groups: int) -> None:
        """The worker was chosen for groups that do not run yet, or, negative, no longer."""
        self._promised[worker] += num_groups
        self._on_node[self._node[worker]] += num_groups

    def least_loaded(self, version: int) -> int | None:
        """The worker that holds `version` or a later one, has room, and runs the fewest groups.

        Of several the first; None: there is no such worker.
        """
        if not len(self._node):
            return None
        busy = self._running + self._promised
        is_able = self._version >= version
        is_able &= busy + self._held < self._max_on_worker
        is_able &= (self._on_node < self._max_on_node)[self._node]
        worker = int(np.where(is_able, busy, np.iinfo(np.int64).max).argmin())
        return worker if is_able[worker] else None


class WorkerQueue:
    """Hands out workers, to groups of the oldest version first."""

    def __init__(self, loads: WorkerLoads, background: Background) -> None:
        self._loads = loads
        self._background = background
        self._waiting: dict[int, deque[asyncio.Future[int]]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def take(self, version: int) -> int:
        """The number of the least loaded worker that holds `version` or a later one and has room.

        Raises: WaitTimeout: nothing changed for too long. The failure of background work.
        """
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(version, deque()).append(waiter)
        if self._serving is None or self._serving.done():
            self._serving = self._background.hold(self._serve_all(), "workers for groups")
        try:
            return await waiter
        except asyncio.CancelledError:
            self._background.notify()  # the worker, if there was one, is free for another
            raise
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._loads.promise(waiter.result(), -1)  # the caller counts it from here on

    async def _serve_all(self) -> None:
        try:
            while True:
                num_served = self._serve_some()
                if not self._waiting:
                    return
                if num_served == GROUPS_PER_TURN:
                    await asyncio.sleep(0)
                    continue
                self._background.raise_failure()
                await self._background.wait(
                    f"a rollout worker with policy version {min(self._waiting)} or later, and room "
                    "in its store"
                )
        except Exception as error:  # the task's end: whoever waits is told
            waiting, self._waiting = self._waiting, {}
            for waiter in (waiter for waiters in waiting.values() for waiter in waiters):
                if not waiter.done():
                    waiter.set_exception(error)

    def _serve_some(self) -> int:
        """How many groups got a worker."""
        num_served = 0
        for version in sorted(self._waiting):
            waiters = self._waiting[version]
            while waiters:
                if waiters[0].done():
                    waiters.popleft()  # cancelled
                    continue
                if num_served == GROUPS_PER_TURN:
                    return num_served
                worker = self._loads.least_loaded(version)
                if worker is None:
                    return num_served  # nor is there one for later versions
                self._loads.promise(worker, 1)
                waiters.popleft().set_result(worker)
                num_served += 1
            del self._waiting[version]
        return num_served
