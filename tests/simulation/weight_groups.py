"""Weight groups of simulated workers: a broadcast waits for all ranks, and fails with one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from areal_sc.errors import EngineFailed
from areal_sc.weights.published import WeightGroup

if TYPE_CHECKING:
    from simulation.workers import SimulatedWorker

POLL_S = 0.25


class SimulatedWeightGroup:
    """One group of rank 0 and all generating ranks.

    Attributes:
        name: a new one for every group.
        is_cancelled: somebody will not take part.
    """

    def __init__(self, name: str, root: SimulatedWorker, timeout_s: float) -> None:
        self.name = name
        self.is_cancelled = False
        self._is_closed = False
        self._world_size = 0
        self._root = root
        self._timeout_s = timeout_s
        self._members: list[SimulatedWorker] = []
        self._receiving: set[str] = set()  # incarnations
        self._num_sent = 0

    def describe(self, world_size: int) -> WeightGroup:
        self._world_size = world_size
        return WeightGroup(self.name, "sim", 1, world_size, "gloo")

    def is_joined_by(self, worker: SimulatedWorker) -> bool:
        return worker in self._members and not self._is_closed

    def close(self) -> None:
        self._is_closed = True

    async def meet(self, worker: SimulatedWorker) -> None:
        """Returns when all ranks are there."""
        if worker is not self._root:
            self._members.append(worker)
        await self._wait(worker, lambda: len(self._members) + 1 == self._world_size)

    async def send(self) -> None:
        """Rank 0 broadcasts; returns when all have received."""
        everybody = {member.incarnation for member in self._members}
        await self._wait(self._root, lambda: self._receiving == everybody)
        await self._root.spend(self._root.cluster.behavior.publication_s)
        await self._wait(self._root, lambda: True)
        self._receiving.clear()
        self._num_sent += 1

    async def receive(self, worker: SimulatedWorker) -> None:
        """A generating rank gets the next broadcast."""
        number = self._num_sent
        self._receiving.add(worker.incarnation)
        await self._wait(worker, lambda: self._num_sent > number)

    async def _wait(self, worker: SimulatedWorker, is_done: Callable[[], bool]) -> None:
        """Raises: EngineFailed: a rank has died, left, or does not come."""
        give_up_s = asyncio.get_running_loop().time() + self._timeout_s
        while True:
            ranks = [self._root, *self._members]
            if any(rank.exit_status is not None for rank in ranks):
                raise EngineFailed(f"a rank of weight group {self.name} has died")
            if self.is_cancelled or self._is_closed:
                raise EngineFailed(f"a rank has left weight group {self.name}")
            if is_done():
                return
            if asyncio.get_running_loop().time() > give_up_s:
                raise EngineFailed(f"not all ranks of weight group {self.name} came in time")
            await asyncio.sleep(POLL_S)
            await worker.spend(0.0)
