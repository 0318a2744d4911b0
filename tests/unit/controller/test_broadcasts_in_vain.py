"""Weight groups that cannot broadcast: weights are pulled, and in the end no more are formed."""

from __future__ import annotations

import pytest
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual
from simulation.weight_groups import SimulatedWeightGroup

from areal_sc.config.schema import WeightUpdateMethod
from areal_sc.errors import EngineFailed
from areal_sc.weights.channel import MAX_BROADCASTS_IN_VAIN

NUM_STEPS = MAX_BROADCASTS_IN_VAIN + 4


def play(failing: set[int], monkeypatch: pytest.MonkeyPatch) -> TrainingRun:
    """A run of which some broadcasts fail, by their numbers."""
    send, numbers = SimulatedWeightGroup.send, iter(range(10**6))

    async def failing_send(group: SimulatedWeightGroup) -> None:
        if next(numbers) in failing:
            raise EngineFailed("Mismatched NCCL version detected")
        await send(group)

    monkeypatch.setattr(SimulatedWeightGroup, "send", failing_send)
    run = TrainingRun(Settings(num_steps=NUM_STEPS, weight_update=WeightUpdateMethod.collective))

    async def steps() -> None:
        async with run.started():
            for _ in range(NUM_STEPS):
                await run.step(checks_business=False)
            await run.collect_evaluation()
            await run.check_end()

    run_virtual(steps())
    return run


def test_ranks_that_cannot_reach_each_other_form_no_more_groups(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = play(set(range(10**3)), monkeypatch)
    assert run.actor.publication_stats["failed_broadcasts"] == MAX_BROADCASTS_IN_VAIN
    assert len(run.cluster.weight_groups) == MAX_BROADCASTS_IN_VAIN
    told = [it.getMessage() for it in caplog.records if "acts as pull" in it.getMessage()]
    assert len(told) == 1
    assert "Mismatched NCCL version detected" in told[0]


def test_a_broadcast_that_arrives_makes_good_for_those_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = play({0, 1, 3, 4}, monkeypatch)
    assert run.actor.publication_stats["failed_broadcasts"] == 4
    assert len(run.cluster.weight_groups) == 5
