"""Sweeps of the rollout workers' stores: shards that nobody needs any more are forgotten.

consumes     the shards that `worker_store` knows to be dead
waits for    the journal, which has to say first that nobody needs them; then the worker's reply
unblocked by these; a worker that is lost meanwhile is told anew in its next life

One sweep a worker at a time, beside everything else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from areal_sc.controller.background import Background
from areal_sc.controller.events import Hear, RoomFreed
from areal_sc.controller.rollout.worker_set import WorkerSet
from areal_sc.controller.rollout.worker_state import RolloutWorkerState, goes_on
from areal_sc.errors import WorkerLost
from areal_sc.transport.rpc.method import Method
from areal_sc.weights.updates import begin_in_turns
from areal_sc.workers.calls import SWEEP, Sweep

CallSweep = Callable[[RolloutWorkerState, Method[Sweep, int], Sweep], Awaitable[int]]
"""Calls a worker, as `RolloutWorkers.call`."""


@dataclass(eq=False)
class StoreSweeps:
    """Has the workers of one RolloutController forget the shards that nobody needs.

    Args:
        workers: whose stores are swept.
        durable: see `TrainingGroups`.
        hear: takes that there is more room.
    """

    workers: WorkerSet
    call: CallSweep
    background: Background
    durable: Callable[[], Awaitable[None]]
    hear: Hear

    def begin(self) -> None:
        """Workers begin to forget the shards that nobody needs any more."""
        self.background.start(begin_in_turns(list(self.workers.states), self.begin_one), "sweeps")

    def begin_one(self, state: RolloutWorkerState) -> bool:
        """One worker begins to, unless it is at it, or has no such shard; tells whether it did."""
        if not state.life.is_up or goes_on(state.sweep) or not state.store.has_dead:
            return False
        state.sweep = self.background.start(self._sweep(state), f"sweep {state.name}")
        return True

    @property
    def are_due(self) -> bool:
        """Whether a store is about to have more room."""
        return any(goes_on(it.sweep) or it.store.has_dead for it in self.workers.states)

    async def _sweep(self, state: RolloutWorkerState) -> None:
        while state.store.has_dead:
            incarnation = state.member.worker.incarnation
            sweep, dead_ids = state.store.plan_sweep(incarnation)
            await self.durable()  # else a later start would look for these rows
            if state.member.worker.incarnation != incarnation:
                continue
            try:
                last_sequence = await self.call(state, SWEEP, sweep)
            except WorkerLost:
                return  # its next life is told anew
            state.store.confirm_sweep(incarnation, dead_ids, last_sequence)
            self.workers.recount(state)
            self.hear(RoomFreed())
            self.background.notify()
