"""A prompt that kills its worker is rejected; those that run beside it are not. In virtual time."""

from __future__ import annotations

import asyncio

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.schema import OverBound
from areal_sc.errors import CrashLoop, TooManyRejections
from areal_sc.workers.calls import RunGroup


class Poisoned(SimulatedCluster):
    """Some groups end their worker, soon after they have begun."""

    poison: frozenset[int] = frozenset({5})

    def note_start(self, worker: SimulatedRolloutWorker, group: RunGroup) -> None:
        super().note_start(worker, group)
        if group.group_id in self.poison:
            asyncio.get_running_loop().call_later(0.3, worker.end, "signal 11 (SIGSEGV)")


@in_virtual_time
@pytest.mark.parametrize("mode", [OverBound.train, OverBound.wait])
@pytest.mark.parametrize("num_workers", [1, 3])
async def test_the_prompt_that_kills_its_workers_is_rejected_and_no_other(
    num_workers: int, mode: OverBound
) -> None:
    warnings: list[str] = []
    settings = Settings(
        num_steps=8,
        num_rollout_workers=num_workers,
        over_bound=mode,
        behavior=Behavior(generation_s=lambda rng: rng.uniform(0.5, 3.0)),
    )
    run = TrainingRun(settings, Poisoned)
    run.rollout.rejections.warn = warnings.append
    async with run.started():
        for _ in range(8):
            await run.step(checks_business=False)
        await run.check_end()
    assert run.rejected == {5: "worker_died"}
    assert run.rollout.rejections.episodes == {"worker_died": run.settings.group_size}
    (warning,) = (text for text in warnings if "was rejected" in text)
    assert f"prompt {run.admitted[5][0].index}" in warning
    assert "SIGSEGV" in warning
    assert "more in " in warning
    assert "rollout-" in warning


@in_virtual_time
async def test_prompts_that_all_kill_their_workers_end_the_run() -> None:
    class AllPoisoned(Poisoned):
        poison = frozenset(range(3, 1000))

    settings = Settings(max_deaths=1000, max_rejection_rate=0.5, rejection_window=4)
    async with TrainingRun(settings, AllPoisoned).started() as run:
        with pytest.raises(TooManyRejections, match="worker_died"):
            await run.step()


@in_virtual_time
async def test_deaths_of_one_worker_that_give_nothing_end_the_run_before() -> None:
    class AllPoisoned(Poisoned):
        poison = frozenset(range(1000))

    settings = Settings(max_deaths=3, num_rollout_workers=1)
    async with TrainingRun(settings, AllPoisoned).started() as run:
        with pytest.raises(CrashLoop, match="died 4 times in a row"):
            await run.step()


@in_virtual_time
async def test_prompts_of_a_whole_dataset_are_rejected_likewise() -> None:
    class PoisonedOutside(Poisoned):
        poison = frozenset({-2})

    async with TrainingRun(Settings(), PoisonedOutside).started() as run:
        batch = await run.rollout.rollout_batch_async(run.prompts, run.workflow, 5)
        assert sorted(batch.group_ids) == [-5, -4, -3, -1]
        assert run.rollout.rejections.episodes == {"worker_died": 2}
