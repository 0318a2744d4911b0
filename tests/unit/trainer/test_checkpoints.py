"""Snapshots get their name when they are whole; what cannot be read is skipped, loudly."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from unit.trainer.conftest import Follower, shown

from areal_sc.config.schema import CheckpointConfig
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import INITIAL_STATE, RejectionCounts, RolloutState
from areal_sc.errors import CheckpointError, RunFolderError, WaitTimeout
from areal_sc.records.metrics_log import read_metrics
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.trainer.checkpoints import Checkpoints
from areal_sc.trainer.evaluation.evaluations import Evaluations
from areal_sc.trainer.run import Run
from areal_sc.trainer.snapshots import CONTROLLERS, load_latest_snapshot


class Actor:
    """Ranks whose writing ends when the test says so."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self.broken: set[int] = set()
        self.late: set[int] = set()
        self.loaded: list[int] = []
        self.noted: list[int] = []
        self.written: Future[None] = Future()
        self.is_fast = False

    def begin_snapshot(self) -> Future[None]:
        partial = self.folder.checkpoints / f".step-{self.version:06d}.partial"
        (partial / "engine").mkdir(exist_ok=True)
        self.written = Future()
        if self.is_fast:
            self.written.set_result(None)
        return self.written

    def begin_save_hf(self, folder: Path) -> Future[None]:
        self.written = Future()
        return self.written

    def note_snapshot(self, step: int) -> None:
        assert self.folder.snapshot_path(step).exists()
        self.noted.append(step)

    def load_snapshot(self, step: int) -> None:
        if step in self.broken:
            raise CheckpointError(f"the files of step {step} are damaged")
        if step in self.late:
            raise WaitTimeout(f"step {step} did not come to node1")
        self.loaded.append(step)


def state_of(version: int) -> RolloutState:
    """That of a controller at this policy version that has trained nothing."""
    training = LedgerState(version=version)
    return RolloutState(training, RejectionCounts({}, 0))


class Other(Actor):
    """A second model."""

    role = "imitator"

    def begin_snapshot(self) -> Future[None]:
        partial = self.folder.checkpoints / f".step-{self.version:06d}.partial"
        (partial / "engine-imitator").mkdir()
        return super().begin_snapshot()


class Rollout:
    def __init__(self) -> None:
        self.version = 0
        self.restored: list[RolloutState] = []

    def state(self) -> RolloutState:
        return state_of(self.version)

    def wait_for_weights(self) -> None:
        pass

    def go_back(self, state: RolloutState) -> None:
        self.restored.append(state)


class Writer:
    """The checkpoints of a run, with ranks and a rollout that a test moves on."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.actor: Any = Actor(run.folder)
        self.rollout: Any = Rollout()
        self.checkpoints = Checkpoints(run, self.actor, self.rollout)

    def begin(self, step: int) -> None:
        self.actor.version = self.rollout.version = step
        self.checkpoints.after_step()

    def snapshot(self, step: int) -> None:
        self.begin(step)
        self.actor.written.set_result(None)
        self.checkpoints.collect()

    def load(self) -> tuple[int, list[str]]:
        return load_latest_snapshot(self.run.folder, self.actor, self.rollout)


@pytest.fixture
def folder(run: Run) -> RunFolder:
    return run.folder


@pytest.fixture
def writer(run: Run) -> Writer:
    return Writer(run)


def events(run: Run) -> list[tuple[str, int]]:
    return [(r["name"], r["step"]) for r in read_metrics(run.folder.metrics_path)]


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_a_snapshot_has_its_name_once_the_ranks_have_written(
    folder: RunFolder, writer: Writer
) -> None:
    writer.begin(3)
    writer.rollout.version = 4  # what comes after does not enter it
    writer.checkpoints.collect(wait=False)
    assert names(folder) == [".step-000003.partial"]
    assert folder.snapshots() == []
    writer.actor.written.set_result(None)
    writer.checkpoints.collect()
    assert names(folder) == ["step-000003"]
    assert events(writer.run) == [("snapshot", 3)]
    assert writer.actor.noted == [3], "ranks that die may begin from it"
    assert writer.load() == (3, [])
    assert writer.rollout.restored == [state_of(3)]


def test_a_start_that_another_has_taken_over_from_leaves_its_snapshots_alone(
    folder: RunFolder, writer: Writer
) -> None:
    """Its thread wakes when the ranks have written, long after it began."""
    writer.snapshot(1)
    writer.begin(2)
    other = RunTerm.begin(folder.path)
    (folder.checkpoints / ".step-000002.partial" / "of the other").touch()
    writer.actor.written.set_result(None)
    writer.checkpoints.collect()
    assert names(folder) == [".step-000002.partial", "step-000001"]
    assert (folder.checkpoints / ".step-000002.partial" / "of the other").exists()
    assert events(writer.run) == [("snapshot", 1)]
    assert not other.is_over
    writer.begin(3)  # nor does it begin one
    writer.checkpoints.collect()
    assert names(folder) == [".step-000002.partial", "step-000001"]


def test_no_snapshot_goes_to_another_folder_of_the_name(folder: RunFolder, writer: Writer) -> None:
    writer.snapshot(1)
    writer.begin(2)
    moved = folder.path.rename(folder.path.with_name("moved"))
    folder.path.mkdir()
    writer.actor.written.set_result(None)
    writer.checkpoints.collect()
    writer.begin(3)
    writer.checkpoints.collect()
    assert list(folder.path.iterdir()) == []
    assert [path.name for path in RunFolder(moved).snapshots()] == ["step-000001"]


def test_the_newest_stay(folder: RunFolder, writer: Writer) -> None:
    for step in (1, 2, 3, 4):
        writer.snapshot(step)
    assert names(folder) == ["step-000003", "step-000004"]


def test_newer_ones_that_cannot_be_read_are_set_aside(folder: RunFolder, writer: Writer) -> None:
    """What is written later of their steps is of another history, and pushes them not out."""
    for step in (4, 5, 6):
        writer.snapshot(step)
    writer.actor.broken = {6}
    step, (warning,) = writer.load()
    assert step == 5
    assert "it is kept as unreadable-step-000006" in warning
    assert names(folder) == ["step-000005", "unreadable-step-000006"]
    writer.actor.broken = set()
    assert writer.load() == (5, []), "that of an abandoned history is not mistaken for a newer one"
    for step in (6, 7):
        writer.snapshot(step)
    assert names(folder) == ["step-000006", "step-000007", "unreadable-step-000006"]
    writer.actor.broken = {7}
    assert writer.load()[0] == 6


def test_without_any_the_run_goes_back_to_the_initial_model(writer: Writer) -> None:
    assert writer.load() == (0, [])
    assert writer.actor.loaded == [0]
    assert writer.rollout.restored == [INITIAL_STATE]


def test_a_failed_one_is_told_and_leaves_the_others(folder: RunFolder, writer: Writer) -> None:
    writer.snapshot(1)
    writer.begin(2)
    writer.actor.written.set_exception(CheckpointError("the disk is full"))
    writer.checkpoints.collect()
    assert "snapshot of step 2 could not be written: the disk is full; the run" in shown(writer.run)
    assert names(folder) == ["step-000001"]
    assert events(writer.run) == [("snapshot", 1), ("snapshot_failed", 2)]
    writer.snapshot(3)
    assert names(folder) == ["step-000001", "step-000003"]


def test_one_that_cannot_be_begun_is_told_and_leaves_the_others(
    folder: RunFolder, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.snapshot(1)

    def full(*arguments: object) -> None:
        raise RunFolderError("no space left on device")

    monkeypatch.setattr(folder, "write_atomic", full)
    writer.begin(2)
    writer.checkpoints.collect()
    assert "snapshot of step 2 could not be written: no space left" in shown(writer.run)
    assert names(folder) == ["step-000001"]
    assert events(writer.run) == [("snapshot", 1), ("snapshot_failed", 2)]


def test_a_model_on_the_way_is_told_with_its_folder(
    run: Run, writer: Writer, follower: Follower
) -> None:
    run.config.checkpoint.every_steps, run.config.checkpoint.export_every_steps = 0, 2
    for step in (1, 2):
        writer.begin(step)
    writer.actor.written.set_result(None)
    writer.begin(4)  # the one before has ended
    assert follower.told == [(2, run.folder.path / "models" / "step-2")]
    writer.actor.written.set_exception(CheckpointError("the disk is full"))
    writer.checkpoints.collect()
    assert len(follower.told) == 1
    assert events(run) == [("model", 2), ("model_failed", 4)]
    assert "the run goes on without this model" in shown(run)


def test_a_model_is_exported_once_a_step_and_anew_after_going_back(
    run: Run, folder: RunFolder, writer: Writer
) -> None:
    checkpoints, asked = writer.checkpoints, list[Path]()

    def save(path: Path) -> Future[None]:
        path.mkdir(parents=True, exist_ok=True)
        asked.append(path)
        return writer.actor.written

    writer.actor.begin_save_hf = save  # type: ignore[method-assign]
    writer.actor.version = 3
    checkpoints.export()
    checkpoints.export()
    path = folder.path / "models" / "step-3"
    assert asked == [path]
    assert not checkpoints.has_model(3), "it is being written"
    writer.actor.written.set_result(None)
    checkpoints.collect()
    assert checkpoints.has_model(3)
    checkpoints.export()
    assert asked == [path]
    checkpoints.before_going_back()
    checkpoints.export()
    assert asked == [path, path], "the step has another model now"


def test_the_last_step_is_on_the_disk_before_what_follows(
    folder: RunFolder, writer: Writer
) -> None:
    """The last evaluation may be stopped, and may take long."""
    writer.begin(99)
    writer.actor.written.set_result(None)
    writer.actor.is_fast = True
    writer.begin(100)
    assert names(folder) == ["step-000099", "step-000100"]


def test_a_loop_that_ended_before_its_time_has_one_of_its_last_step(
    run: Run, folder: RunFolder, writer: Writer
) -> None:
    """Before it evaluates, which may be stopped."""
    run.config.checkpoint.every_steps = 5
    writer.actor.is_fast = True
    writer.begin(7)
    Evaluations(run, writer.rollout, None, "workflow").finish()  # type: ignore[arg-type]
    assert names(folder) == ["step-000007"]


def test_without_snapshots_there_is_none_of_the_last_step(run: Run, folder: RunFolder) -> None:
    run.config.checkpoint.every_steps = 0
    Writer(run).begin(100)
    assert names(folder) == []


def test_what_a_killed_run_left_unfinished_is_deleted(run: Run, folder: RunFolder) -> None:
    (folder.checkpoints / ".step-000007.partial" / "engine").mkdir(parents=True)
    Writer(run).snapshot(1)
    assert names(folder) == ["step-000001"]


@pytest.mark.parametrize(
    ("settings", "minutes_a_step", "expected"),
    [
        ({}, 0.1, [10, 20, 30]),
        ({}, 4, [3, 6, 9, 10, 13, 16, 19, 20, 23, 26, 29, 30]),
        ({"every_minutes": 0}, 60, [10, 20, 30]),
        ({"every_steps": 0}, 60, []),
    ],
)
def test_one_is_due_after_so_many_steps_or_minutes(
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    minutes_a_step: float,
    expected: list[int],
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("areal_sc.trainer.checkpoints.time.monotonic", lambda: now_s)
    run.config.checkpoint = CheckpointConfig(**settings)
    writer = Writer(run)
    for step in range(1, 31):
        now_s += 60 * minutes_a_step
        writer.begin(step)
        if not writer.actor.written.done():
            writer.actor.written.set_result(None)
    writer.checkpoints.collect()
    assert [step for _, step in events(run)] == expected


def test_unreadable_ones_are_skipped_with_a_warning(folder: RunFolder, writer: Writer) -> None:
    actor = writer.actor
    for step in (1, 2):
        writer.snapshot(step)
    actor.broken = {2}
    step, warnings = writer.load()
    assert (step, actor.loaded) == (1, [1])
    assert len(warnings) == 1
    assert "step-000002 cannot be read (the files of step 2 are damaged)" in warnings[0]
    (folder.checkpoints / "unreadable-step-000002").rename(folder.snapshot_path(2))
    (folder.checkpoints / "step-000001" / CONTROLLERS).unlink()
    with pytest.raises(CheckpointError, match=r"no snapshot in .* can be read: .*000002.*000001"):
        writer.load()


def test_one_that_does_not_come_to_the_ranks_is_none_that_cannot_be_read(
    folder: RunFolder, writer: Writer
) -> None:
    for step in (1, 2):
        writer.snapshot(step)
    writer.actor.late = {2}
    with pytest.raises(WaitTimeout, match="step 2 did not come"):
        writer.load()
    assert (names(folder), writer.actor.loaded) == (["step-000001", "step-000002"], [])
    writer.actor.late = set()
    assert writer.load() == (2, [])


def test_no_flipped_bit_of_the_controllers_is_loaded(folder: RunFolder, writer: Writer) -> None:
    """Every single bit: the snapshot before is loaded in its place, with a warning."""
    rollout = writer.rollout
    for step in (1, 2):
        writer.snapshot(step)
    path = folder.checkpoints / "step-000002" / CONTROLLERS
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        step, warnings = writer.load()
        assert (step, len(warnings)) == (1, 1), f"bit {bit}"
        assert "its checksum is wrong, its content damaged" in warnings[0]
        assert rollout.restored.pop() == state_of(1)
        (folder.checkpoints / "unreadable-step-000002").rename(path.parent)
    path.write_bytes(content)
    assert writer.load() == (2, [])


def test_a_snapshot_of_another_step_is_not_loaded(folder: RunFolder, writer: Writer) -> None:
    actor = writer.actor
    writer.snapshot(3)
    folder.snapshot_path(3).rename(folder.snapshot_path(8))
    with pytest.raises(CheckpointError, match="expected the state after step 8, got that after 3"):
        writer.load()
    assert actor.loaded == []


def test_a_snapshot_of_a_newer_version_is_left_alone(
    writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back to the one before would throw away what the newer version did."""
    writer.snapshot(1)
    with monkeypatch.context() as newer:
        newer.setattr("areal_sc.trainer.snapshots.FORMAT", 7)
        writer.snapshot(2)
    with pytest.raises(RunFolderError, match="expected format 3, got 7: another version of areal"):
        writer.load()


def test_a_further_model_is_in_the_snapshots_once_it_is_trained(
    run: Run, folder: RunFolder
) -> None:
    actor, other, rollout = Actor(folder), Other(folder), Rollout()
    models: Any = (actor, rollout, other)
    checkpoints = Checkpoints(run, *models)
    actor.is_fast = other.is_fast = True
    for step, version in ((3, 0), (6, 6), (9, 8)):
        actor.version, rollout.version, other.version = step, step, version
        checkpoints.after_step()
        checkpoints.collect()
    inside = [sorted(it.name for it in path.iterdir()) for path in folder.snapshots()]
    assert inside == [
        [CONTROLLERS, "engine"],
        [CONTROLLERS, "engine", "engine-imitator"],
    ], "one whose model is behind is not written"
    assert (actor.noted, other.noted) == ([3, 6], [6])
    assert load_latest_snapshot(folder, *models) == (6, [])
    shutil.rmtree(folder.snapshot_path(6))
    assert load_latest_snapshot(folder, *models) == (3, [])
    assert (actor.loaded, other.loaded) == ([6, 3], [6, 0])
