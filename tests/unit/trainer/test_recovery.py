"""Snapshots get their name when they are whole; what cannot be read is skipped, loudly."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import CheckpointConfig
from areal_sc.controller.ledger import Ledger
from areal_sc.controller.rejections import RejectionCounts
from areal_sc.controller.rollout import RolloutState
from areal_sc.controller.training_groups import TrainingState
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.run_folder import RunFolder
from areal_sc.trainer.recovery import CONTROLLERS, SnapshotWriter, load_latest_snapshot


class Actor:
    """Ranks whose writing ends when the test says so."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self.version = 0
        self.broken: set[int] = set()
        self.loaded: list[int] = []
        self.written: Future[None] = Future()

    def begin_snapshot(self) -> Future[None]:
        partial = self.folder.checkpoints / f".step-{self.version:06d}.partial"
        (partial / "engine").mkdir()
        self.written = Future()
        return self.written

    def load_snapshot(self, step: int) -> None:
        if step in self.broken:
            raise CheckpointError(f"the files of step {step} are damaged")
        self.loaded.append(step)


def state_of(version: int) -> RolloutState:
    """That of a controller at this policy version that has trained nothing."""
    training = TrainingState(version, 0, (), Ledger().snapshot())
    return RolloutState(training, RejectionCounts({}, 0))


class Rollout:
    def __init__(self) -> None:
        self.version = 0
        self.restored: list[RolloutState] = []

    def state(self) -> RolloutState:
        return state_of(self.version)

    def restore(self, state: RolloutState) -> None:
        self.restored.append(state)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[RunFolder]:
    with RunFolder(tmp_path / "run") as folder:
        folder.open(config_text="seed: 0")
        yield folder


@pytest.fixture
def events() -> list[tuple[str, int]]:
    return []


@pytest.fixture
def writer(folder: RunFolder, events: list[tuple[str, int]]) -> SnapshotWriter:
    def record(name: str, **values: Any) -> None:
        events.append((name, values["step"]))

    return SnapshotWriter(folder, CheckpointConfig(), record)


def snapshot(writer: SnapshotWriter, actor: Any, rollout: Any, step: int) -> None:
    actor.version = rollout.version = step
    writer.begin(actor, rollout)
    actor.written.set_result(None)
    writer.collect(wait=True)


def names(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in folder.checkpoints.iterdir())


def test_a_snapshot_has_its_name_once_the_ranks_have_written(
    folder: RunFolder, writer: SnapshotWriter, events: list[tuple[str, int]]
) -> None:
    actor, rollout = Actor(folder), Rollout()
    actor.version = rollout.version = 3
    writer.begin(actor, rollout)  # type: ignore[arg-type]
    rollout.version = 4  # what comes after does not enter it
    writer.collect(wait=False)
    assert names(folder) == [".step-000003.partial"]
    assert folder.snapshots() == []
    actor.written.set_result(None)
    writer.collect(wait=True)
    assert names(folder) == ["step-000003"]
    assert events == [("snapshot", 3)]
    assert load_latest_snapshot(folder, actor, rollout) == (3, [])  # type: ignore[arg-type]
    assert rollout.restored == [state_of(3)]


def test_the_newest_stay(folder: RunFolder, writer: SnapshotWriter) -> None:
    for step in (1, 2, 3, 4):
        snapshot(writer, Actor(folder), Rollout(), step)
    assert names(folder) == ["step-000003", "step-000004"]


def test_newer_ones_that_could_not_be_read_push_no_good_one_out(
    folder: RunFolder, writer: SnapshotWriter
) -> None:
    for step in (7, 8, 9):
        folder.snapshot_path(step).mkdir()
    for step in (4, 5, 6):
        snapshot(writer, Actor(folder), Rollout(), step)
    assert [int(name[-1]) for name in names(folder)] == [5, 6, 7, 8, 9]
    assert load_latest_snapshot(folder, Actor(folder), Rollout())[0] == 6  # type: ignore[arg-type]


def test_a_failed_one_is_told_and_leaves_the_others(
    folder: RunFolder, writer: SnapshotWriter, events: list[tuple[str, int]]
) -> None:
    actor, rollout = Actor(folder), Rollout()
    snapshot(writer, actor, rollout, 1)
    actor.version = 2
    writer.begin(actor, rollout)  # type: ignore[arg-type]
    actor.written.set_exception(CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="step-000002 could not be written: the disk is full"):
        writer.collect(wait=True)
    assert names(folder) == ["step-000001"]
    assert events == [("snapshot", 1), ("snapshot_failed", 2)]
    snapshot(writer, actor, rollout, 3)
    assert names(folder) == ["step-000001", "step-000003"]


def test_what_a_killed_run_left_unfinished_is_deleted(folder: RunFolder) -> None:
    (folder.checkpoints / ".step-000007.partial" / "engine").mkdir(parents=True)
    SnapshotWriter(folder, CheckpointConfig(), lambda name, **values: None)
    assert names(folder) == []


def test_one_is_due_after_so_many_steps_or_minutes(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr("areal_sc.trainer.recovery.time.monotonic", lambda: now_s)

    def due(config: CheckpointConfig, minutes: float) -> list[int]:
        """Of 30 steps that take so many minutes each."""
        nonlocal now_s
        writer = SnapshotWriter(folder, config, lambda name, **values: None)
        actor, taken = Actor(folder), []
        for step in range(1, 31):
            now_s += 60 * minutes
            actor.version = step
            if writer.is_due(step):
                taken.append(step)
                snapshot(writer, actor, Rollout(), step)
        return taken

    assert due(CheckpointConfig(), minutes=0.1) == [10, 20, 30]
    assert due(CheckpointConfig(), minutes=4) == [*range(3, 10, 3), 10, *range(13, 20, 3), 20,
                                                  *range(23, 30, 3), 30]  # fmt: skip
    assert due(CheckpointConfig(every_minutes=0), minutes=60) == [10, 20, 30]
    assert due(CheckpointConfig(every_steps=0), minutes=60) == []


def test_unreadable_ones_are_skipped_with_a_warning(
    folder: RunFolder, writer: SnapshotWriter
) -> None:
    actor: Any = Actor(folder)
    rollout: Any = Rollout()
    for step in (1, 2):
        snapshot(writer, actor, rollout, step)
    actor.broken = {2}
    step, warnings = load_latest_snapshot(folder, actor, rollout)
    assert (step, actor.loaded) == (1, [1])
    assert len(warnings) == 1
    assert "step-000002 cannot be read (the files of step 2 are damaged)" in warnings[0]
    (folder.checkpoints / "step-000001" / CONTROLLERS).unlink()
    with pytest.raises(CheckpointError, match=r"no snapshot in .* can be read: .*000002.*000001"):
        load_latest_snapshot(folder, actor, rollout)


def test_no_flipped_bit_of_the_controllers_is_loaded(
    folder: RunFolder, writer: SnapshotWriter
) -> None:
    """Every single bit: the snapshot before is loaded in its place, with a warning."""
    actor: Any = Actor(folder)
    rollout: Any = Rollout()
    for step in (1, 2):
        snapshot(writer, actor, rollout, step)
    path = folder.checkpoints / "step-000002" / CONTROLLERS
    content = path.read_bytes()
    for bit in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        step, warnings = load_latest_snapshot(folder, actor, rollout)
        assert (step, len(warnings)) == (1, 1), f"bit {bit}"
        assert "its checksum is wrong, its content damaged" in warnings[0]
        assert rollout.restored.pop() == state_of(1)
    path.write_bytes(content)
    assert load_latest_snapshot(folder, actor, rollout) == (2, [])


def test_a_snapshot_of_another_step_is_not_loaded(
    folder: RunFolder, writer: SnapshotWriter
) -> None:
    actor: Any = Actor(folder)
    snapshot(writer, actor, Rollout(), 3)
    folder.snapshot_path(3).rename(folder.snapshot_path(8))
    with pytest.raises(CheckpointError, match="expected the state after step 8, got that after 3"):
        load_latest_snapshot(folder, actor, Rollout())  # type: ignore[arg-type]
    assert actor.loaded == []


def test_a_snapshot_of_a_newer_version_is_left_alone(
    folder: RunFolder, writer: SnapshotWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back to the one before would throw away what the newer version did."""
    actor: Any = Actor(folder)
    rollout: Any = Rollout()
    snapshot(writer, actor, rollout, 1)
    with monkeypatch.context() as newer:
        newer.setattr("areal_sc.trainer.recovery.FORMAT", 7)
        snapshot(writer, actor, rollout, 2)
    with pytest.raises(RunFolderError, match="expected format 2, got 7: another version of areal"):
        load_latest_snapshot(folder, actor, rollout)
