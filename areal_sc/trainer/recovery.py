"""Snapshots: what a run needs to go on after its process has ended.

    checkpoints/step-<n>/engine/             weights, optimizer, schedule, RNG of every rank
    checkpoints/step-<n>/controllers.msgpack policy version, ledger, place in the prompt stream;
                                             before it one line: format, and checksum of the rest

The ranks' files have checksums of their own. A snapshot is written under another name and gets its
own once everything is on disk, so one that has its name is whole. It is written while training goes
on, from copies of the state at its step. Rows that were generated but not trained are not kept:
their groups are generated again.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from areal_sc.config.schema import CheckpointConfig
from areal_sc.controller.rollout import RolloutController, RolloutState
from areal_sc.controller.train import TrainController
from areal_sc.durable import commit_folder, partial_of
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.run_folder import RunFolder

logger = logging.getLogger(__name__)

CONTROLLERS = "controllers.msgpack"
FORMAT = 2
_KIND = b"areal_sc-controllers"


class SnapshotWriter:
    """Writes the snapshots of a run, one at a time, beside training.

    begin     every rank copies its state, and the controllers' is written; training goes on
    complete  once the ranks have written theirs, on a thread of its own: the snapshot gets its
              name, and outdated ones go
    collect   what went wrong with it is told

    Args:
        folder: the run's, opened by this process.
        config: when snapshots are due, and how many of the newest stay.
        record: keeps `snapshot` and `snapshot_failed`, each with its step, in the run's metrics.
    """

    def __init__(
        self, folder: RunFolder, config: CheckpointConfig, record: Callable[..., None]
    ) -> None:
        self._folder = folder
        self._config = config
        self._began_s = time.monotonic()
        self._record = record
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="snapshots")
        self._completed: Future[None] | None = None
        for leftover in folder.checkpoints.glob("*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)  # of a run that was killed meanwhile

    def is_due(self, version: int) -> bool:
        """Whether to begin one: after so many steps, or so many minutes if those come first."""
        every_steps, limit_s = self._config.every_steps, 60 * self._config.every_minutes
        if every_steps == 0:
            return False
        is_late = 0 < limit_s <= time.monotonic() - self._began_s
        return is_late or version % every_steps == 0

    def begin(self, actor: TrainController, rollout: RolloutController) -> None:
        """Takes the current policy version; the snapshot before has been collected.

        Raises: CheckpointError: the disk is full, say; earlier snapshots are left as they were.
        """
        assert self._completed is None, "the snapshot before is not collected"
        step, partial = actor.version, self._partial(actor.version)
        self._began_s = time.monotonic()
        try:
            partial.mkdir(parents=True, exist_ok=True)
            self._folder.write_atomic(partial / CONTROLLERS, _sealed(rollout.state()))
            written = actor.begin_snapshot()
        except (OSError, RunFolderError, CheckpointError) as error:
            raise self._failed(step, error) from error
        self._completed = self._thread.submit(self._complete, step, written)

    def collect(self, *, wait: bool) -> None:
        """Ends with the snapshot that was begun, if any; without `wait`, if it is complete.

        Raises: CheckpointError: it could not be written; earlier ones are left as they were.
        """
        if self._completed is None or not (wait or self._completed.done()):
            return
        completed, self._completed = self._completed, None
        completed.result()  # bounded by the time limit of the ranks' writing

    def _complete(self, step: int, written: Future[None]) -> None:
        try:
            written.result()
            commit_folder(self._partial(step), self._folder.snapshot_path(step))
        except (OSError, CheckpointError) as error:
            raise self._failed(step, error) from error
        # Newer ones, which could not be read when the run went on from here, do not count.
        own = [path for path in self._folder.snapshots() if _step_of(path) <= step]
        for outdated in own[: -self._config.keep]:
            shutil.rmtree(outdated, ignore_errors=True)
        self._record("snapshot", step=step)

    def _partial(self, step: int) -> Path:
        return partial_of(self._folder.snapshot_path(step))

    def _failed(self, step: int, error: Exception) -> CheckpointError:
        shutil.rmtree(self._partial(step), ignore_errors=True)
        self._record("snapshot_failed", step=step, error=str(error))
        final = self._folder.snapshot_path(step)
        return CheckpointError(f"snapshot {final} could not be written: {error}")


def load_latest_snapshot(
    folder: RunFolder, actor: TrainController, rollout: RolloutController
) -> tuple[int, list[str]]:
    """Goes back to the newest snapshot that can be read.

    Returns: its step, and a warning for each newer one that could not be read.
    Raises: CheckpointError: none can be read. RunFolderError: one is of a newer areal_sc.
    """
    warnings: list[str] = []
    for path in reversed(folder.snapshots()):
        step = _step_of(path)
        try:
            state = _read_state(path / CONTROLLERS, step)
            actor.load_snapshot(step)
        except CheckpointError as error:
            warnings.append(
                f"snapshot {path} cannot be read ({error}); going back to the one before"
            )
            logger.warning(warnings[-1])
            continue
        rollout.restore(state)
        return step, warnings
    raise CheckpointError(
        f"no snapshot in {folder.checkpoints} can be read: " + "; ".join(warnings)
    )


def _step_of(snapshot: Path) -> int:
    return int(snapshot.name.rpartition("-")[2])


def _sealed(state: RolloutState) -> bytes:
    """The state behind its line: kind, format, sha256 of the format and what follows."""
    packed = msgspec.msgpack.encode(state)
    return b" ".join([_KIND, b"%d" % FORMAT, _digest(b"%d" % FORMAT, packed)]) + b"\n" + packed


def _digest(format_number: bytes, packed: bytes) -> bytes:
    return hashlib.sha256(format_number + b"\n" + packed).hexdigest().encode()


def _read_state(path: Path, step: int) -> RolloutState:
    """What `_sealed` wrote for that step.

    Raises: CheckpointError: it is gone, damaged, or of another step.
        RunFolderError: a newer areal_sc wrote it; going back would throw away what it did.
    """
    try:
        line, _, packed = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    kind, _, rest = line.partition(b" ")
    format_number, _, digest = rest.partition(b" ")
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
