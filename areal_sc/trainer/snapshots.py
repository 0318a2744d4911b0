"""Snapshots that a run goes on from, read: the controllers' state, and the way back to them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rollout_state import INITIAL_STATE, RolloutState
from areal_sc.controller.standstill import Standstill
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.nodes.spec import snapshot_name
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.durable import remove
from areal_sc.system.os_errors import os_errors_as

logger = logging.getLogger(__name__)

CONTROLLERS = "controllers.msgpack"
FORMAT = 3
_KIND = b"areal_sc-controllers"


class SnapshotState(Protocol):
    """What a snapshot keeps beside the models: a `RolloutController`'s state."""

    @property
    def standstill(self) -> Standstill: ...

    def state(self) -> RolloutState: ...

    def go_back(self, state: RolloutState) -> None: ...


def load_latest_snapshot(
    folder: RunFolder,
    actor: TrainController,
    rollout: SnapshotState,
    *others: TrainController,
) -> tuple[int, list[str]]:
    """Goes back to the newest snapshot that can be read; without any, to the initial model.

    Newer ones are set aside: later snapshots of their steps will be of another history.

    Returns: its step, and a warning for each newer one that could not be read.
    Raises: CheckpointError: none can be read. RunFolderError: one is of a newer areal_sc, or cannot
        be set aside.
    """
    warnings: list[str] = []
    unreadable: list[Path] = []
    snapshots = folder.snapshots()
    if not snapshots:
        actor.load_snapshot(0)
        _load_others(others, 0, folder.snapshot_path(0))
        rollout.go_back(INITIAL_STATE)
        return 0, []
    for path in reversed(snapshots):
        step = _step_of(path)
        try:
            state = _read_state(path / CONTROLLERS, step)
            actor.load_snapshot(step)
            _load_others(others, step, path)
        except CheckpointError as error:
            warnings.append(
                f"snapshot {path} cannot be read ({error}); going back to the one before; it is "
                f"kept as unreadable-{path.name}"
            )
            logger.warning(warnings[-1])
            unreadable.append(path)
            continue
        for newer in unreadable:
            _set_aside(newer)
        rollout.go_back(state)
        return step, warnings
    raise CheckpointError(
        f"no snapshot in {folder.checkpoints} can be read: " + "; ".join(warnings)
    )


def _load_others(models: Sequence[TrainController], step: int, snapshot: Path) -> None:
    """Loads the other models of a snapshot; one that is not in it was not trained by then.

    Raises: CheckpointError: one cannot be read.
    """
    for model in models:
        is_trained = (snapshot / snapshot_name(model.role)).exists()
        if is_trained or model.version:
            model.load_snapshot(step if is_trained else 0)


def newest_ledger(folder: RunFolder) -> LedgerState | None:
    """The ledger of the newest snapshot whose controllers' state can be read.

    Raises: RunFolderError: see `load_latest_snapshot`.
    """
    states = (state for _, state in readable_states(folder))  # `load_latest_snapshot` warns
    return next((s.training for s in states if not isinstance(s, CheckpointError)), None)


def readable_states(folder: RunFolder) -> Iterator[tuple[Path, RolloutState | CheckpointError]]:
    """The snapshots, newest first, each with its controllers' state, or why that cannot be read.

    Raises: RunFolderError: see `load_latest_snapshot`.
    """
    for path in reversed(folder.snapshots()):
        try:
            yield path, _read_state(path / CONTROLLERS, _step_of(path))
        except CheckpointError as error:
            yield path, error


def _set_aside(snapshot: Path) -> None:
    aside = snapshot.with_name(f"unreadable-{snapshot.name}")
    with os_errors_as(RunFolderError, f"cannot rename {snapshot}"):
        remove(aside)
        snapshot.rename(aside)


def _step_of(snapshot: Path) -> int:
    return int(snapshot.name.rpartition("-")[2])


def sealed(state: RolloutState) -> bytes:
    """The state behind its line: kind, format, sha256 of the format and what follows."""
    packed = msgspec.msgpack.encode(state)
    return b" ".join([_KIND, b"%d" % FORMAT, _digest(b"%d" % FORMAT, packed)]) + b"\n" + packed


def _digest(format_number: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(format_number + b"\n" + packed).hexdigest().encode()


def _read_state(path: Path, step: int) -> RolloutState:
    """What `sealed` wrote for that step.

    Raises: CheckpointError: it is gone, damaged, or of another step.
        RunFolderError: a newer areal_sc wrote it; going back would throw away what it did.
    """
    with os_errors_as(CheckpointError, str(path)):
        line, _, packed = path.read_bytes().partition(b"\n")
    kind, format_number, digest, *_ = [*line.split(b" "), b"", b""]
    if kind != _KIND or digest != _digest(format_number, packed):
        raise CheckpointError(f"{path}: its checksum is wrong, its content damaged")
    if int(format_number) != FORMAT:
        raise RunFolderError(
            f"{path}: expected format {FORMAT}, got {int(format_number)}: another version of "
            "areal_sc wrote it; go on with that one, or choose another run_dir"
        )
    state = msgspec.msgpack.decode(packed, type=RolloutState)
    if state.training.version != step:
        raise CheckpointError(
            f"{path}: expected the state after step {step}, got that after {state.training.version}"
        )
    return state
