"""Snapshots in memory can be spared: they make room for what a run cannot go on without."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.train_worker import SimulatedTrainWorker
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual
from simulation.workers import SimulatedRolloutWorker

from areal_sc.errors import StoreFull
from areal_sc.workers.calls import RunGroup


async def in_full_memory(
    method: str, *, has_snapshots: bool, kind: type[Any] = SimulatedTrainWorker
) -> TrainingRun:
    """A run in whose shared memory a call of workers has no room beside snapshots."""
    run = TrainingRun(Settings(num_steps=6, memory_snapshots=has_snapshots, behavior=Behavior()))
    act = getattr(kind, method)

    async def full(self: Any, args: object) -> object:
        if self.cluster.snapshots or not has_snapshots:
            raise StoreFull("the arena cannot take 9 bytes more")
        return await act(self, args)

    with patch.object(kind, method, full):
        async with run.started():
            for _ in range(run.settings.num_steps):
                await run.step()
            await run.check_end()
    return run


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        (SimulatedTrainWorker, "seal_weights"),
        (SimulatedTrainWorker, "compute_field"),
        (SimulatedRolloutWorker, "run_group"),
    ],
)
def test_snapshots_in_memory_yield_once_and_loudly(
    kind: type[Any], method: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_virtual(in_full_memory(method, has_snapshots=True, kind=kind))
    assert not run.cluster.snapshots
    (warning,) = (text for text in caplog.messages if "are given up" in text)
    assert "checkpoint.memory_snapshots=false" in warning
    assert "the arena cannot take 9 bytes more" in warning


async def rollout_batch_in_full_memory() -> TrainingRun:
    """Between two training steps; `in_full_memory` has the same of training's own rows."""
    run = TrainingRun(Settings(num_steps=6, behavior=Behavior()))
    act = SimulatedRolloutWorker.run_group

    async def full(self: Any, args: RunGroup) -> object:
        if self.cluster.snapshots and args.group_id < 0:
            raise StoreFull("the arena cannot take 9 bytes more")
        return await act(self, args)

    with patch.object(SimulatedRolloutWorker, "run_group", full):
        async with run.started():
            for _ in range(3):
                await run.step()
            assert run.cluster.snapshots
            batch = await run.rollout.rollout_batch_async(run.prompts, run.workflow, num_groups=2)
            assert len(batch.rows) == 2 * run.settings.group_size
            for _ in range(3):
                await run.step()
            await run.check_end()
    return run


def test_rows_that_are_not_of_training_get_their_room_too() -> None:
    run = run_virtual(rollout_batch_in_full_memory())
    assert not run.cluster.snapshots


def test_without_them_a_full_memory_ends_the_run() -> None:
    with pytest.raises(StoreFull):
        run_virtual(in_full_memory("seal_weights", has_snapshots=False))
