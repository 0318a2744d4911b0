"""Snapshots that a run goes on from, read: the controllers' state, and the way back to them.

What a run is about to go on from is checked before any worker is started. Each file says by itself
when it is damaged, but not when it lost its end at a place where it could have ended. The journal
must have come at least as far as the newest snapshot, since a publication is on the disk before its
snapshot begins; and no lineage may get a number for a second time.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.schema import GRPOConfig, further_models
from areal_sc.controller.background import Standstill
from areal_sc.controller.ledger.journal import ledger_on_disk
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.controller.rollout.rejections import INITIAL_STATE, RolloutState
from areal_sc.controller.train.train_controller import TrainController
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.nodes.spec import snapshot_name
from areal_sc.records.metrics_log import History
from areal_sc.run.run_begin import RunBegin, content_of
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.disk import Disk
from areal_sc.system.durable import os_errors_as, remove

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


def describe_resume(folder: RunFolder, actor: TrainHandle) -> Iterator[str]:
    """What a run would go on from, and what of it is damaged; reads all of it, writes nothing.

    Raises: RunFolderError: see `check_resumed`. CheckpointError: no snapshot can be read.
    """
    yield from check_resumed(folder)
    for path, state in readable_states(folder):
        try:
            if isinstance(state, CheckpointError):
                raise state
            for engine in (path / "engine", *path.glob("engine-*")):
                actor.check_snapshot(engine)
        except CheckpointError as error:
            yield f"snapshot {path} cannot be read ({error}); it would go back to the one before"
            continue
        ledger = state.training
        yield f"it would go on after step {ledger.version}, of lineage {ledger.lineage}: {path}"
        written = ledger_on_disk(folder.ledger, Disk())
        if written is not None and written.version > ledger.version:
            yield (
                f"the journal knows version {written.version} of lineage {written.lineage}: steps "
                f"after {ledger.version} would be trained anew"
            )
        return
    raise CheckpointError(f"no snapshot in {folder.checkpoints} can be read")


def compare_with_begin(folder: RunFolder, config: GRPOConfig) -> None:
    """Warns where models, script or loss are not those that the run began with.

    The first start notes what they are. Raises: RunFolderError: they cannot be read, or noted.
    """
    begin = RunBegin(folder.begun_path)
    paths = [config.actor.path, *(model.path for model in further_models(config).values())]
    found = {f"model {path}": Path(path) for path in (*paths, config.rollout.path)}
    if config.actor.has_adapter and config.actor.lora.path:
        found[f"adapter {config.actor.lora.path}"] = Path(config.actor.lora.path)
    script = Path(getattr(sys.modules["__main__"], "__file__", None) or "").resolve()
    if script.is_file() and begin.noted(f"code {script}") is None:  # else the sources compare it
        found[f"script {script}"] = script
    loss = config.actor.ppo.loss.partition(":")[0].split(".")
    if folder_of_loss := loss_of(config.actor.ppo).search_path():
        found[f"loss {config.actor.ppo.loss}"] = Path(folder_of_loss, *loss).with_suffix(".py")
    begin.compare({name: content_of(path) for name, path in found.items() if path.exists()})


def check_resumed(folder: RunFolder) -> list[str]:
    """Checks what a run goes on from.

    Returns: warnings, about what is only for the reader.
    Raises: RunFolderError: a file is damaged, or does not fit the others.
    """
    warnings = []
    ledger, on_disk = newest_ledger(folder), ledger_on_disk(folder.ledger, Disk())
    written = None if on_disk is None else (on_disk.lineage, on_disk.version)
    if written is not None:
        folder.check_lineage(written[0])
    if ledger is None:  # no snapshot can be read: loading them ends the run
        return []
    folder.check_lineage(ledger.lineage)
    if written is None:
        warnings.append(
            f"there is no journal in {folder.ledger}: the account of the run begins with its "
            f"newest snapshot, of step {ledger.version}"
        )
    elif written < (ledger.lineage, ledger.version):
        raise RunFolderError(
            f"the journal in {folder.ledger} lost its end: it ends with lineage {written[0]}, "
            f"version {written[1]}, and the newest snapshot is of lineage {ledger.lineage}, "
            f"version {ledger.version}. Nothing goes on from it. Move the folder away to start "
            "from that snapshot, with an account that begins there"
        )
    steps = {metrics.step for metrics in History.read(folder.metrics_path).steps}
    missing = sorted(set(range(1, ledger.version + 1)) - steps)
    if missing:
        warnings.append(
            f"{folder.metrics_path} lacks {len(missing)} of the {ledger.version} steps before "
            f"the newest snapshot, from step {missing[0]} on: the summary will lack them"
        )
    return warnings
