"""What the journal's table promises: a record is on the disk before its act."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from simulation.behavior import Behavior
from simulation.cluster import SimulatedCluster
from simulation.disk import SimulatedDisk
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual
from simulation.workers import SimulatedRolloutWorker

from areal_sc.config.schema import OverBound
from areal_sc.controller.ledger import journal as module
from areal_sc.controller.ledger.journal import read_segment, segment_paths
from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.controller.ledger.ledger_account import GroupAccount, read_account
from areal_sc.errors import RunFolderError
from areal_sc.metadata import BatchMetadata
from areal_sc.weights.published import WeightsReference
from areal_sc.workers.calls import RunGroup

SETTINGS = Settings(
    over_bound=OverBound.regenerate,
    max_staleness=1,
    behavior=Behavior(
        generation_s=lambda rng: rng.lognormvariate(0.0, 1.2), training_s=0.3, group_rejection=0.1
    ),
)


class CheckedCluster(SimulatedCluster):
    """Looks at the disk whenever a worker is asked for something."""

    disk: SimulatedDisk
    num_checks = 0

    def on_disk(self) -> Ledger:
        """The ledger as a new controller would find it after a crash."""
        self.num_checks += 1
        folder = next(it for it in self.disk.durable if it.suffix == ".journal").parent
        path = segment_paths(folder, self.disk)[-1]
        segment = read_segment(self.disk.durable[path], path)
        ledger = Ledger.restore(segment.state)
        replay(ledger, segment.records)
        return ledger

    def note_start(self, worker: SimulatedRolloutWorker, group: RunGroup) -> None:
        super().note_start(worker, group)
        found = self.on_disk().get(group.group_id)
        assert found is not None, "a worker runs a group that was never admitted"
        assert (found.attempt, found.prompt) == (group.attempt, group.prompt)

    def note_trained(self, version: int, minibatch: int, batch: BatchMetadata) -> None:
        super().note_trained(version, minibatch, batch)
        (step,) = self.on_disk().snapshot().kept
        assert step.step == version
        sealed = {row for group in step.groups if group.batch for row in group.batch.rows}
        plain = {(row.group_id, row.attempt, row.sequence_length) for row in sealed}
        assert {(r.group_id, r.attempt, r.sequence_length) for r in batch.rows} <= plain


def checked_run() -> TrainingRun:
    run = TrainingRun(SETTINGS, CheckedCluster)
    assert isinstance(run.cluster, CheckedCluster)
    cluster, disk = run.cluster, run.disk
    cluster.disk = disk
    disk.latency_s = lambda rng: rng.expovariate(10)
    adopt = run.rollout.adopt_weights

    def check(weights: WeightsReference) -> None:
        found = cluster.on_disk()
        assert found.version == weights.version
        assert found.account()["rows_trained"] == sum(b.total_batch_size for b in run.batches)
        adopt(weights)

    run.rollout.adopt_weights = check  # type: ignore[method-assign]
    return run


def test_records_are_on_the_disk_before_their_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEGMENT_BYTES", 3000)
    run = checked_run()
    run_virtual(run.play())
    assert isinstance(run.cluster, CheckedCluster)
    assert run.cluster.num_checks > 60
    paths = [path for path in run.disk.files if path.suffix == ".journal"]
    assert len(paths) > 3
    groups: list[GroupAccount] = []
    account = read_account(paths[0].parent, groups.append, run.disk)
    assert len(groups) == len(run.admitted) == account.totals["admitted"]
    assert (account.rows_lost, account.totals["rows_trained_twice"]) == (0, 0)
    of_steps = {g.group: g.step for g in groups if g.outcome == "trained"}
    assert of_steps == run.trained_at
    assert {g.group: g.cause for g in groups if g.outcome == "rejected"} == run.rejected


@pytest.mark.parametrize("change", ["write", "sync"])
@pytest.mark.parametrize("since_s", [0.5, 2.0])
def test_a_run_ends_with_the_failure_of_its_disk(change: str, since_s: float) -> None:
    run = TrainingRun(SETTINGS)

    def fail(made: str, path: Path) -> None:
        if made == change and run.cluster.now_s > since_s:
            raise OSError(errno.EIO, "Input/output error")

    run.disk.before = fail
    with pytest.raises(RunFolderError, match=r"cannot write .*000001\.journal: Input/output error"):
        run_virtual(run.play())
