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


async def in_full_memory(
    method: str, *, memory_every: int, kind: type[Any] = SimulatedTrainWorker
) -> TrainingRun:
    """A run in whose shared memory a call of workers has no room beside snapshots."""
    run = TrainingRun(Settings(num_steps=6, memory_every=memory_every, behavior=Behavior()))
    act = getattr(kind, method)

    async def full(self: Any, args: object) -> object:
        if self.cluster.snapshots or not memory_every:
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
    run = run_virtual(in_full_memory(method, memory_every=1, kind=kind))
    assert not run.cluster.snapshots
    (warning,) = (text for text in caplog.messages if "are given up" in text)
    assert "checkpoint.memory_every_steps=1" in warning
    assert "the arena cannot take 9 bytes more" in warning


def test_without_them_a_full_memory_ends_the_run() -> None:
    with pytest.raises(StoreFull):
        run_virtual(in_full_memory("seal_weights", memory_every=0))
