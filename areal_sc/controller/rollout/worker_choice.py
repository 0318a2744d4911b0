"""Which rollout worker takes the next group, and the groups that wait for one.

consumes     groups, each with the oldest policy version that it may start on
waits for    a worker that holds that version and has room
unblocked by every change that `Background` tells of: a weight update, a group's end, a sweep

All groups of a step may be admitted at the moment at which a version exists, and some worker is the
first that holds it. So while others are about to, nobody gets more than its share of the groups.
A group that has room in a store already, since an earlier attempt has left episodes there, goes to
that worker, whoever waits before it: its room is of no use to others.

A step hands hundreds of groups to thousands of workers. So the workers' counts lie in arrays that
are compared at once, and one task serves all groups: if each looked for itself, every change would
wake hundreds of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_sc.controller.background import Background

GROUPS_PER_TURN: Final = 32
"""Most groups that get a worker in one turn of the event loop; that takes some milliseconds."""


class WorkerLoads:
    """Counts of groups, by the worker's number.

    Args:
        nodes: each worker's node; "": there is no worker of that number.
        max_on_worker: groups that one store holds.
        max_on_node: node -> groups that its stores hold together.
        promised: groups that each worker was chosen for, as `promise` says; None: none.

    Attributes:
        num_stored: groups that take room in a store, on all workers together: running ones, and
            those whose rows lie there.
    """

    def __init__(
        self,
        nodes: Sequence[str],
        max_on_worker: int,
        max_on_node: Mapping[str, int],
        promised: Mapping[int, int] | None = None,
    ) -> None:
        self.num_stored = 0
        max_on_node = {**max_on_node, "": 0}
        number = {node: i for i, node in enumerate(max_on_node)}
        self._node = np.array([number[node] for node in nodes], np.intp)
        self.max_on_worker = max_on_worker
        self._max_on_node = np.array(list(max_on_node.values()), np.int64)
        self._on_node = np.zeros(len(number), np.int64)
        self._version, self._running, self._held, self._promised = np.zeros(
            (4, len(nodes)), np.int64
        )
        self._gets_newest = np.zeros(len(nodes), np.bool_)
        self._takes_groups = np.zeros(len(nodes), np.bool_)
        for worker, num_groups in (promised or {}).items():
            self.promise(worker, num_groups)

    def note_load(
        self,
        worker: int,
        *,
        version: int,
        num_running: int,
        num_held: int,
        gets_newest: bool = False,
    ) -> None:
        """The worker's counts are these now.

        Args: gets_newest: it will soon hold the newest version, if it does not yet.
        """
        num_new = num_running + num_held - int(self._running[worker] + self._held[worker])
        self._on_node[self._node[worker]] += num_new
        self.num_stored += num_new
        self._version[worker] = version
        self._running[worker] = num_running
        self._held[worker] = num_held
        self._gets_newest[worker] = gets_newest
        self._takes_groups[worker] = version >= 0

    def promise(self, worker: int, num_groups: int) -> None:
        """The worker was chosen for groups that do not run yet, or, negative, no longer."""
        self._promised[worker] += num_groups
        self._on_node[self._node[worker]] += num_groups

    @property
    def promised(self) -> dict[int, int]:
        """Groups that workers were chosen for, and that do not run yet."""
        return {int(worker): int(self._promised[worker]) for worker in self._promised.nonzero()[0]}

    def least_loaded(self, version: int, num_waiting: int = 1) -> int | None:
        """The worker that holds `version` or a later one, has room, and runs the fewest groups.

        Args:
            num_waiting: groups that are to be shared out.
        Returns: of several the first; None: there is no such worker, or it has its share.
        """
        if not len(self._node):
            return None
        busy, has_room = self._running + self._promised, self._has_room
        is_able = has_room & (self._version >= version)
        worker = int(np.where(is_able, busy, np.iinfo(np.int64).max).argmin())
        if not is_able[worker]:
            return None
        shares = is_able | (has_room & self._gets_newest)
        num_groups = int(busy[shares].sum()) + num_waiting
        return worker if busy[worker] * int(shares.sum()) < num_groups else None

    def takes(self, worker: int, version: int) -> bool:
        """Whether the worker takes groups, and holds `version` or a later one."""
        return bool(self._takes_groups[worker] and self._version[worker] >= version)

    @property
    def full(self) -> list[int]:
        """Workers that take groups; none if any of them has room, or was chosen for a group."""
        takes = self._takes_groups
        is_any_free = (takes & (self._has_room | (self._promised > 0))).any()
        return [] if is_any_free else [int(worker) for worker in takes.nonzero()[0]]

    @property
    def _has_room(self) -> NDArray[np.bool_]:
        has_room = self._running + self._promised + self._held < self.max_on_worker
        return has_room & (self._on_node < self._max_on_node)[self._node]


_Waiter = asyncio.Future[tuple[int, int]]
"""Gets the number of a worker, and how many groups were promised to it."""


class WorkerQueue:
    """Hands out workers, to groups of the oldest version first.

    Attributes:
        loads: of the workers that there are now.
    """

    def __init__(self, loads: WorkerLoads, background: Background) -> None:
        self.loads = loads
        self._background = background
        self._waiting: dict[int, deque[_Waiter]] = {}
        self._homes: dict[_Waiter, tuple[int, Callable[[], Sequence[int]]]] = {}
        self._serving: asyncio.Task[None] | None = None

    async def take_worker(self, version: int, homes: Callable[[], Sequence[int]] = list) -> int:
        """The number of the least loaded worker that holds `version` or a later one and has room.

        Args:
            homes: workers that have room for this group, the one to be preferred first.
        Raises: WaitTimeout: nothing changed for too long. The failure of background work.
        """
        waiter: _Waiter = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(version, deque()).append(waiter)
        if homes():
            self._homes[waiter] = version, homes
        if self._serving is None or self._serving.done():
            self._serving = self._background.hold(self._serve_all(), "workers for groups")
        try:
            worker, _ = await waiter
            return worker
        except asyncio.CancelledError:
            self._background.notify()  # the worker, if there was one, is free for another
            raise
        finally:
            self._homes.pop(waiter, None)
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                worker, num_promised = waiter.result()
                self.loads.promise(worker, -num_promised)  # the caller counts it from here on

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
        """How many groups got a worker; none does in a paused run."""
        if self._background.standstill.is_on:
            return 0
        num_served = 0
        for waiter, (version, homes) in list(self._homes.items()):
            home = next((it for it in homes() if self.loads.takes(it, version)), None)
            if home is not None and not waiter.done():
                waiter.set_result((home, 0))  # the group's shards there count all the while
        num_waiting = sum(map(len, self._waiting.values()))
        for version in sorted(self._waiting):
            waiters = self._waiting[version]
            while waiters:
                if waiters[0].done():
                    waiters.popleft()  # cancelled
                    continue
                if num_served == GROUPS_PER_TURN:
                    return num_served
                worker = self.loads.least_loaded(version, num_waiting - num_served)
                if worker is None:
                    return num_served  # nor is there one for later versions
                self.loads.promise(worker, 1)
                waiters.popleft().set_result((worker, 1))
                num_served += 1
            del self._waiting[version]
        return num_served
