"""What evaluations cost the steps beside them: the real controllers, in virtual time, with engines
that take the same time for each answer."""

from __future__ import annotations

import asyncio

from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.controller.rollout.evaluation import EvaluationOutcome, EvaluationSet

NUM_SETS, NUM_PROMPTS, NUM_SAMPLES = 3, 10, 16


class EvaluatedRun(TrainingRun):
    """Evaluates three sets all the time, one evaluation after the other, as a run does."""

    outcomes: list[EvaluationOutcome]
    _sets: asyncio.Task[list[EvaluationOutcome]] | None = None

    async def _evaluate_when_due(self) -> None:
        if self._sets is not None and not self._sets.done():
            return
        await self.collect_evaluation()
        sets = [EvaluationSet(self.prompts, self.workflow, NUM_PROMPTS, NUM_SAMPLES)] * NUM_SETS
        self._sets = asyncio.create_task(self.rollout.evaluate_sets_async(sets))

    async def collect_evaluation(self) -> None:
        if self._sets is not None:
            self.outcomes = [*getattr(self, "outcomes", []), *await self._sets]


def test_steps_take_as_long_as_without_evaluations() -> None:
    behavior = Behavior(generation_s=6.0, training_s=4.0, evaluation_s=6.0)
    settings = Settings(
        num_steps=16,
        max_staleness=1,
        batch_groups=8,
        num_rollout_workers=2,
        behavior=behavior,
    )
    alone = run_virtual(TrainingRun(settings).play())
    beside = run_virtual(EvaluatedRun(settings).play())
    assert isinstance(beside, EvaluatedRun)
    assert len(beside.outcomes) >= 2 * NUM_SETS, "they go on nearly all the time"
    assert {it.num_samples * it.num_prompts for it in beside.outcomes} == {
        NUM_PROMPTS * NUM_SAMPLES
    }
    assert all(it.versions[0] == it.versions[1] for it in beside.outcomes), "the worker is held"
    assert beside.duration_s <= 1.02 * alone.duration_s
