"""Groups that wait for a rollout worker.

consumes     groups, each with the oldest policy version that it may start on
waits for    a worker that holds that version and has room
unblocked by every change that `Background` tells of: a weight update, a group's end, a sweep

One task serves all groups. If each looked for itself, every change would wake hundreds of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from areal_sc.controller.background import Background
from areal_sc.controller.worker_loads import WorkerLoads

GROUPS_PER_TURN: Final = 32
"""Started without giving the event loop a turn: some milliseconds."""


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
            self._serving = asyncio.create_task(self._serve_all(), name="workers for groups")
        try:
            return await waiter
        except asyncio.CancelledError:
            self._background.notify()  # the worker, if there was one, is free for another
            raise
        finally:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._loads.promise(waiter.result(), -1)  # the caller counts it from here on

    async def close(self) -> None:
        """Nobody waits any more."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

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
                version = min(self._waiting)
                await self._background.wait(
                    f"a rollout worker with policy version {version} or later, and room in its "
                    "store"
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
