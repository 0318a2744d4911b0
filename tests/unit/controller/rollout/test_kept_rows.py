"""Rows of trained steps stay as long as the step may be repeated, and room allows."""

from __future__ import annotations

import asyncio

import pytest
from simulation.cluster import SimulatedCluster
from simulation.settings import Settings
from simulation.train_worker import SimulatedTrainWorker
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.controller.events import RowsNeeded
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.rollout.kept_rows import KeptRows
from areal_sc.metadata import (
    BatchMetadata,
    Columns,
    PromptReference,
    RowMetadata,
    RowRun,
    ShardMetadata,
)
from areal_sc.token_fields import TRAJECTORY_FIELDS

VERSION = 4
"""Steps 0 to 3 are trained, each on the group of the same number."""


def batch_of(group_id: int) -> BatchMetadata:
    row = RowMetadata(
        group_id=group_id,
        attempt=0,
        sequence_length=3,
        reward=0.0,
        admitted_version=group_id,
        version_spans=((group_id, 1),),
        episode=0,
    )
    shard = ShardMetadata("rollout/0", "sim://0", f"a.{group_id}", (RowRun(0, 0, 1),))
    columns = (Columns(dict(TRAJECTORY_FIELDS), (shard,)),)
    return BatchMetadata(f"g{group_id}", group_id, columns, (row,))


@pytest.fixture
def ledger() -> Ledger:
    made = Ledger()
    for step in range(VERSION):
        group = made.admit(PromptReference(0, step, 0), step)
        made.start(group.group_id, "rollout/0")
        made.finish(group.group_id, 0, batch_of(step))
        made.consume([group.group_id], step)
    return made


def test_nothing_stays_unless_it_is_asked_for(ledger: Ledger) -> None:
    rows = KeptRows()
    rows.release(ledger, VERSION - 1)
    assert ledger.kept_steps == [3], "the batch of the current version"
    assert not rows.let_go(ledger, VERSION - 1)


def test_rows_go_once_their_step_is_covered(ledger: Ledger) -> None:
    rows = KeptRows()
    rows.keep_from(RowsNeeded("train", VERSION, 2, False))
    rows.release(ledger, VERSION)
    assert ledger.kept_steps == [2, 3]
    assert ledger.needs_rows(2, 0)
    assert not ledger.needs_rows(2, 1), "rows of another attempt"
    assert not ledger.needs_rows(1, 0)


def test_where_room_is_short_the_oldest_step_goes_and_it_is_said_once(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    rows = KeptRows()
    rows.keep_from(RowsNeeded("train", VERSION, 0, False))
    rows.release(ledger, VERSION)
    assert rows.let_go(ledger, VERSION)
    assert rows.let_go(ledger, VERSION)
    assert ledger.kept_steps == [2, 3]
    said = [r.getMessage().count("lack room for the rows of step 1,") for r in caplog.records]
    assert said == [1]
    assert rows.has_let_go
    rows.keep_from(RowsNeeded("train", VERSION, 3, False))
    rows.release(ledger, VERSION)
    assert rows.has_let_go, "steps are still uncovered"
    rows.keep_from(RowsNeeded("train", VERSION, 4, False))
    rows.release(ledger, VERSION)
    assert not rows.has_let_go


def test_rows_that_a_snapshot_will_cover_soon_stay(ledger: Ledger) -> None:
    rows = KeptRows()
    rows.keep_from(RowsNeeded("train", VERSION, 0, True))
    rows.release(ledger, VERSION)
    assert not rows.let_go(ledger, VERSION)
    rows.keep_from(RowsNeeded("train", VERSION, 3, True))
    rows.release(ledger, VERSION)
    assert ledger.kept_steps == [3]


class SlowSnapshots(SimulatedCluster):
    """Ranks write for longer than a step takes."""

    async def write_snapshot(self, rank: SimulatedTrainWorker) -> None:
        await rank.spend(60.0)


class RunThatKeepsRows(TrainingRun):
    """Those of trained steps stay, since no snapshot covers them yet."""

    def check_stores(self, batch: BatchMetadata) -> None:
        """They hold more than what is left to be trained."""


def test_a_snapshot_in_memory_that_was_skipped_is_made_up_for_at_once() -> None:
    """Else the rows of the newest steps would wait for the next version, and may lack room."""

    async def play() -> None:
        run = RunThatKeepsRows(Settings(num_steps=4), SlowSnapshots)
        async with run.started():
            for _ in range(3):
                await run.step()
            written = run.cluster.snapshots
            assert run.cluster.now_s < 60, "the snapshot of version 1 is still being written"
            await asyncio.sleep(60)
            assert {key.version for key in written} == {1}
            await asyncio.sleep(60)
            assert max(key.version for key in written) == 3

    run_virtual(play())


def test_rows_stay_for_each_model_that_is_trained_once_a_step(ledger: Ledger) -> None:
    rows = KeptRows()
    rows.keep_from(RowsNeeded("train", VERSION, 3, False))
    rows.keep_from(RowsNeeded("critic", VERSION - 1, 1, False))
    rows.release(ledger, VERSION)
    assert ledger.kept_steps == [1, 2, 3]
    rows.keep_from(RowsNeeded("critic", VERSION - 2, 1, False))
    rows.release(ledger, VERSION)
    assert ledger.kept_steps == [3], "its versions are no steps"
