"""What is known of one rollout worker, through all its lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Final

from areal_sc.controller.worker_store import WorkerStore
from areal_sc.fleet.member import Member
from areal_sc.fleet.worker_life import Life
from areal_sc.workers.calls import GroupAttempt

NO_VERSION: Final = -1
"""Version of a worker that can get no groups: it is below the version of every group."""


@dataclass(eq=False)
class RolloutWorkerState:
    """One rollout worker, through all its lives.

    Attributes:
        number: its index within its role; no other worker has it as long as this one is there.
        store: the groups that take room in its store.
        built_with: the policy version of its engine as it was built, or NO_VERSION.
        version: the policy version that its engine holds; NO_VERSION: it must get one first.
        are_rows_known: it is known which shards its present life holds.
        num_calls: of groups and evaluations, that it has not answered.
        holds: evaluations that it skips publications for.
        update: the weight update that goes on, or the last one.
        sweep: the sweep of its store that goes on, or the last one.
        has_memory: it has memory of its device, or takes some, as far as is known.
        is_building: it builds its engine.
    """

    member: Member
    number: int
    store: WorkerStore[GroupAttempt]
    built_with: int = 0
    version: int = 0
    are_rows_known: bool = True
    num_calls: int = 0
    holds: set[object] = field(default_factory=set)
    update: asyncio.Task[None] | None = None
    sweep: asyncio.Task[None] | None = None
    has_memory: bool = False
    is_building: bool = False

    @property
    def name(self) -> str:
        return self.member.name

    @property
    def life(self) -> Life:
        """Whether it is up, and whether it leaves."""
        return self.member.life

    @property
    def is_updating(self) -> bool:
        return goes_on(self.update)


def goes_on(task: asyncio.Task[None] | None) -> bool:
    return task is not None and not task.done()
