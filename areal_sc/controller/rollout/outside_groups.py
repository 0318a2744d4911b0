"""Groups outside of admission, staleness and the ledger: whole datasets, and evaluations.

consumes     prompts, in their order
waits for    a worker, and its reply, for each
unblocked by the replies, and by `Background`'s failure; an evaluation's worker keeps its weights
             until the last one
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from areal_sc.controller.events import RoomFreed
from areal_sc.controller.ledger.group import Group, RolloutSource
from areal_sc.controller.rollout.evaluation import Keep, Known
from areal_sc.controller.rollout.groups import Groups, GroupTools
from areal_sc.controller.rollout.worker_set import RolloutWorkerState
from areal_sc.controller.shared_card import Side
from areal_sc.errors import StepsLost, StoreFull, WorkerLost, WorkflowError
from areal_sc.metadata import BatchMetadata, concat
from areal_sc.rejection import Rejection, describe_counts
from areal_sc.workers.calls import (
    EvaluationReply,
    GroupAttempt,
    RunEvaluation,
)

logger = logging.getLogger(__name__)

S = TypeVar("S")
T = TypeVar("T")


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
