"""How a group runs, in and outside of training, whatever workers die.

    a worker is taken ──► the prompt runs on it ──► reply
          ▲                       │
          └─── again ◄─── the worker is lost, or its store is full

A prompt whose workers die again and again may be to blame. Whatever runs beside such a prompt loses
its run, too. So a prompt that was hit a few times is a *suspect*, and suspects run one after the
other: those that are innocent end, and the one whose worker dies all the same is rejected. Groups
of agents outside are no suspects: they may take days, and would wait for each other.

`OutsideGroups` are outside of admission, staleness and the ledger: whole datasets, and evaluations.

consumes     prompts, in their order
waits for    a worker, and its reply, for each
unblocked by the replies, and by `Background`'s failure; an evaluation's worker keeps its weights
             until the last one
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, TypeVar

from areal_sc.controller.events import RoomFreed
from areal_sc.controller.ledger.group import Group, MakeReadable, RolloutSource
from areal_sc.controller.rollout.evaluation import Keep, Known
from areal_sc.controller.rollout.rejections import Rejections
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.controller.shared_card import Side
from areal_sc.controller.step_life import StepLife
from areal_sc.errors import StepsLost, StoreFull, WorkerLost, WorkflowError
from areal_sc.metadata import BatchMetadata, PromptReference, concat
from areal_sc.rejection import Rejection, RejectionKind, describe_counts
from areal_sc.workers.calls import (
    EvaluationReply,
    GroupAttempt,
    GroupReply,
    RejectedEpisodes,
    RunEvaluation,
)

logger = logging.getLogger(__name__)
S = TypeVar("S")
T = TypeVar("T")

DEATHS_OF_A_SUSPECT: Final = 2
"""One death hits all groups of a worker, and running one after the other takes time."""

DEATHS_TO_BLAME: Final = 3
"""Consecutive deaths after which a suspect group is blamed; so many are hardly chance."""


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


@dataclass(frozen=True)
class RegisteredSet:
    """An `EvaluationSet` as workers know it.

    Attributes:
        evaluation: its answers are recorded by this name; "": they are not recorded.
        version: policy version when the evaluation begins.
    """

    source: RolloutSource
    num_prompts: int
    num_samples: int
    temperature: float | None
    evaluation: str
    version: int


class OutsideGroups(Groups):
    """Runs prompts beside training, which takes none of their rows."""

    def __init__(self, tools: GroupTools) -> None:
        super().__init__(tools)
        self._num_open = 0
        self._num_groups = 0
        self._lost: set[int] = set()  # groups whose rows are gone
        self._needed: dict[int, int] = {}  # attempts of groups whose rows may still be read
        self._returned: set[int] = set()  # those of them that a batch was returned of
        self._awaited: set[asyncio.Future[Any]] = set()  # results of calls

    @property
    def num_awaited(self) -> int:
        return self._num_open

    def needs(self, run: GroupAttempt) -> bool:
        """Whether its rows are in a batch that was not forgotten, or will be in one."""
        return self._needed.get(run.group_id) == run.attempt

    def lose_rows(self, runs: Iterable[GroupAttempt]) -> None:
        """The rows of these runs are gone; groups of batches that are not complete run again."""
        self._lost |= {run.group_id for run in runs if self.needs(run)}

    def lose_steps(self) -> None:
        """Calls raise StepsLost: their workers may wait for weights that nobody makes."""
        for results in self._awaited:
            if not results.done():
                results.set_exception(StepsLost(self.step.why_lost))

    async def run_batch(
        self, source: RolloutSource, num_groups: int, version: int
    ) -> BatchMetadata:
        """Runs groups for `RolloutController.rollout_batch_async` on `version` or later ones."""

        async def run(group: Group) -> BatchMetadata | None:
            reply = await self._reply(group, source, lambda: self._workers.set.take_worker(version))
            self._rejections.add_group(reply.rejected, self._config.group_size)
            if reply.batch is None:
                self._workers.hear(RoomFreed())
            else:
                self.num_finished += 1
            return reply.batch

        groups = []
        for index in range(num_groups):
            self._num_groups += 1
            row = index % (source.num_prompts or num_groups)
            prompt = source.prompt(row, self._config.seed)
            groups.append(Group(-self._num_groups, prompt, version))
        group_ids = {group.group_id for group in groups}
        self._needed |= dict.fromkeys(group_ids, 0)
        results: dict[int, BatchMetadata | None] = {}
        try:
            missing = groups
            while missing:
                with self._workers.card.wanted(Side.generation):
                    replies = await self._for_each(missing, run)
                results |= {g.group_id: r for g, r in zip(missing, replies, strict=True)}
                await self._background.wait_until(
                    lambda: self._workers.are_rows_known(*{g.worker for g in groups}),
                    "workers to tell what they still hold",
                )
                missing = [group for group in groups if group.group_id in self._lost]
                for group in missing:
                    self._lost.remove(group.group_id)
                    self._begin_again(group)
        except BaseException:
            self._let_go(group_ids)
            raise
        self._returned |= group_ids
        batches = [batch for batch in results.values() if batch is not None]
        if not batches:
            causes = describe_counts(self._rejections.episodes)
            causes += f"; left out as too long: {len(self._rejections.left_out)}"
            raise WorkflowError(f"all {len(groups)} groups were rejected: {causes}")
        return concat(batches, batch_id=self._new_id(), global_step=version)

    def forget(self) -> None:
        """Lets go of the rows of all batches that were returned so far."""
        returned, self._returned = self._returned, set()
        self._let_go(returned)

    def _let_go(self, group_ids: set[int]) -> None:
        for group_id in group_ids:
            self._needed.pop(group_id)
        self._lost -= group_ids
        if group_ids:
            self._workers.begin_sweeps()

    def _begin(self, group: Group, worker: RolloutWorkerState) -> None:
        group.worker = worker.name

    def _begin_again(self, group: Group, *_: object) -> None:
        group.attempt += 1
        self._needed[group.group_id] = group.attempt

    async def evaluate(
        self, sets: Sequence[RegisteredSet], *, keep: Keep | None, known: Known
    ) -> list[list[EvaluationReply]]:
        """Runs episodes for `RolloutController.evaluate_async`, all sets on one held worker.

        Returns: for each set, the replies to all answers of its first prompt, then of the next one.
        """
        async with self._workers.updates.held_for_evaluation() as held:

            async def run(place: tuple[int, int, int]) -> EvaluationReply:
                number, index, sample = place
                if place in known:
                    return known[place]
                one = sets[number]
                prompt = one.source.prompt(index, self._config.seed)
                episode = RunEvaluation(
                    prompt,
                    one.source.workflow,
                    one.temperature,
                    keeps_text=keep is not None,
                    evaluation=one.evaluation,
                    step=one.version,
                    sample=sample,
                )

                async def evaluate(worker: RolloutWorkerState) -> EvaluationReply:
                    reply = await self._workers.evaluate(worker, episode)
                    if reply.rejection is None:
                        self._workers.note_progress(worker)
                    return reply

                reply = await self._outlive(prompt, held.worker, evaluate, _tell_lost_prompt)
                if isinstance(reply, Rejection):
                    reply = EvaluationReply(None, rejection=reply)
                if reply.rejection is None:
                    self.num_finished += 1
                else:
                    self._rejections.note_rejection(reply.rejection)
                if keep is not None:
                    keep(number, index, sample, reply)
                return reply

            places = [
                (number, index, sample)
                for number, one in enumerate(sets)
                for index in range(one.num_prompts)
                for sample in range(one.num_samples)
            ]
            replies = iter(await self._for_each(places, run))
            return [list(islice(replies, it.num_prompts * it.num_samples)) for it in sets]

    async def _for_each(self, items: Iterable[S], run: Callable[[S], Awaitable[T]]) -> list[T]:
        """Results in order, at most `max_concurrent_groups` of them at a time.

        Raises: StepsLost: the ranks make no weights.
        """
        self.step.check()
        slots = asyncio.Semaphore(self._config.max_concurrent_groups)

        async def one(item: S) -> T:
            async with slots:
                return await run(item)

        def note_end(_: asyncio.Task[T]) -> None:
            self._num_open -= 1

        tasks = [asyncio.create_task(one(item)) for item in items]
        self._num_open += len(tasks)
        for task in tasks:
            task.add_done_callback(note_end)
        results = asyncio.gather(*tasks)
        self._awaited.add(results)
        try:
            return await self._background.unless_failed(results)
        finally:
            self._awaited.discard(results)
            for task in tasks:
                task.cancel()
            await asyncio.gather(results, *tasks, return_exceptions=True)


def _tell_lost_prompt(worker: RolloutWorkerState, error: WorkerLost | StoreFull) -> None:
    logger.warning("an evaluated prompt is lost with %s: %s", worker.name, error)
