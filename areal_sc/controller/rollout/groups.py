"""What groups in and outside of training have in common: how one runs, whatever workers die.

    a worker is taken ──► the prompt runs on it ──► reply
          ▲                       │
          └─── again ◄─── the worker is lost, or its store is full

A prompt whose workers die again and again may be to blame. Whatever runs beside such a prompt loses
its run, too. So a prompt that was hit a few times is a *suspect*, and suspects run one after the
other: those that are innocent end, and the one whose worker dies all the same is rejected. Groups
of agents outside are no suspects: they may take days, and would wait for each other.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, TypeVar

from areal_sc.controller.ledger.group import Group, MakeReadable, RolloutSource
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.controller.step_life import StepLife
from areal_sc.errors import StoreFull, WorkerLost
from areal_sc.metadata import PromptReference
from areal_sc.rejection import Rejection, RejectionKind
from areal_sc.workers.calls import GroupAttempt, GroupReply, RejectedEpisodes

DEATHS_OF_A_SUSPECT: Final = 2
"""One death hits all groups of a worker, and running one after the other takes time."""

DEATHS_TO_BLAME: Final = 3
"""Consecutive deaths after which a suspect group is blamed; so many are hardly chance."""

T = TypeVar("T")


@dataclass(frozen=True)
class GroupTools:
    """What groups need of their controller.

    Attributes:
        make_readable: returns when workers can read a row of a dataset.
        new_id: names batches.
    """

    workers: RolloutWorkers
    rejections: Rejections
    make_readable: MakeReadable
    new_id: Callable[[], str]


class Groups(ABC):
    """Runs groups on the workers of one controller.

    Attributes:
        step: the training step that goes on.
        num_finished: groups, or evaluated prompts, that gave something, since the start.
    """

    def __init__(self, tools: GroupTools) -> None:
        self.step = StepLife()
        self.num_finished = 0
        self._workers = tools.workers
        self._config = tools.workers.config
        self._background = tools.workers.background
        self._rejections = tools.rejections
        self._make_readable = tools.make_readable
        self._new_id = tools.new_id
        self._suspects = asyncio.Lock()  # held by the one that runs

    @property
    @abstractmethod
    def num_awaited(self) -> int:
        """Groups, and prompts of evaluations, that wait or run, and may end."""

    async def _reply(
        self, group: Group, source: RolloutSource, take: Callable[[], Awaitable[RolloutWorkerState]]
    ) -> GroupReply:
        """What a worker replies for a group; as `_outlive`."""

        async def run(worker: RolloutWorkerState) -> GroupReply:
            self._begin(group, worker)
            return await self._workers.run_group(worker, group, source)

        def again(worker: RolloutWorkerState, error: WorkerLost | StoreFull) -> None:
            self._begin_again(group, worker, error)

        may_blame = not source.waits_outside
        reply = await self._outlive(group.prompt, take, run, again, may_blame=may_blame)
        if isinstance(reply, Rejection):
            attempt = GroupAttempt(group.group_id, group.attempt)
            return GroupReply(attempt, rejected=(RejectedEpisodes(self._config.group_size, reply),))
        return reply

    @abstractmethod
    def _begin(self, group: Group, worker: RolloutWorkerState) -> None:
        """The group begins to run."""

    @abstractmethod
    def _begin_again(
        self, group: Group, worker: RolloutWorkerState, error: WorkerLost | StoreFull
    ) -> None:
        """The group has to run again, as its next attempt."""

    async def _outlive(
        self,
        prompt: PromptReference,
        take: Callable[[], Awaitable[RolloutWorkerState]],
        run: Callable[[RolloutWorkerState], Awaitable[T]],
        again: Callable[[RolloutWorkerState, WorkerLost | StoreFull], None],
        *,
        may_blame: bool = True,
    ) -> T | Rejection:
        """What a run of the prompt gives in the end; a rejection, if the prompt is to blame.

        Args:
            take: gives a worker when there is one for it; `run` begins before anything is awaited.
            again: is told of each run that came to nothing.
            may_blame: the prompt may be a suspect.
        Raises: StoreFull: nothing can be spared for its rows. What `take` raises, and all else.
        """
        await self._make_readable(prompt.dataset, prompt.index)
        num_deaths, was_full = 0, False
        while True:
            async with self._suspects if num_deaths >= DEATHS_OF_A_SUSPECT else nullcontext():
                worker = await take()
                try:
                    return await run(worker)
                except WorkerLost as death:  # says nothing of the prompt, unless it is to blame
                    again(worker, death)
                    num_deaths += may_blame
                    if num_deaths == DEATHS_OF_A_SUSPECT + DEATHS_TO_BLAME:
                        return _blame(prompt, num_deaths, death)
                except StoreFull as error:
                    if was_full or not await self._workers.yield_memory(error):
                        raise
                    was_full = True
                    again(worker, error)


def _blame(prompt: PromptReference, num_deaths: int, death: WorkerLost) -> Rejection:
    return Rejection(
        RejectionKind.worker_died,
        f"its worker died {num_deaths} times in a row while it ran, {DEATHS_TO_BLAME} of "
        f"them while no other prompt was suspected; the last time: {death}",
        prompt_index=prompt.index,
        log=death.log_path or "",
    )
