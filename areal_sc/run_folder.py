"""The folder that a run lives in: one owner at a time, and files that survive a crash.

    run.json         marks the folder as a run's, and says its format; only such a folder is emptied
    config.yaml      the resolved settings
    summary.json     written last: the run is finished
    metrics.jsonl    one line a training step
    samples.jsonl    what the model read and wrote: a few answers of each training step
    ledger/          the journal of every group's life: what was trained, when, and only once
    learning_curve.png
    logs/            <role>-<index>.log
    checkpoints/     step-<number>/: a snapshot; one that is being written has another name
    model/           the trained model
    exports/<role>/  models that are being written
    keys.json        the keys of the running run; its owner's alone
    sources/         how workers build the user's datasets and workflows
    previous/<n>/    what an earlier start left that had no snapshot to go on from
    tracker_id       names the run for trackers; it keeps it when it is resumed
    .lineage         number of the newest history of weights

The lock is the kernel's, so it ends with its process, however that ends: `file_lock`.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

from areal_sc.config.differences import check_resumable
from areal_sc.durable import remove, write_atomic
from areal_sc.errors import RunFolderError
from areal_sc.file_lock import HeldLock, take_lock

FORMAT_VERSION = 5
"""Of everything that a run resumes from. It is raised when an older areal_sc could not read it."""

OWNER_ONLY = 0o700

_LOCK = ".lock"
_LOCK_WAIT_S = 1.0
"""The agent of a killed run holds the lock for a moment, while it cleans up."""

_LINEAGE = ".lineage"
_MARKER = "run.json"
_SUBFOLDERS = ("logs", "checkpoints", "sources")
_PREVIOUS = "previous"
_SNAPSHOT_PREFIX = "step"

_logger = logging.getLogger(__name__)


class Opening(Enum):
    """What opening a folder does."""

    start = "start a new run"
    resume = "go on from the last snapshot"
    restart = "start again, because an earlier start left no snapshot"
    overwrite = "empty the folder and start a new run"


class RunFolder:
    """The durable files of one run; construct it anywhere, `open` it to own it.

    Attributes:
        path: absolute path of the folder. Others are those of what is in it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser().absolute()
        self.config_path = self.path / "config.yaml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.samples_path = self.path / "samples.jsonl"
        self.summary_path = self.path / "summary.json"
        self.tracker_id_path = self.path / "tracker_id"
        self.learning_curve_path = self.path / "learning_curve.png"
        self.keys_path = self.path / "keys.json"
        self.logs = self.path / "logs"
        self.checkpoints = self.path / "checkpoints"
        self.ledger = self.path / "ledger"
        self.exports = self.path / "exports"
        self.sources = self.path / "sources"
        self._lock: HeldLock | None = None

    def log_path(self, name: str) -> Path:
        """Of a process such as `train/0`."""
        return self.logs / f"{name.replace('/', '-')}.log"

    def snapshot_path(self, step: int) -> Path:
        """Where the snapshot after `step` training steps lies once it is whole."""
        return self.checkpoints / f"{_SNAPSHOT_PREFIX}-{step:06d}"

    def snapshots(self) -> list[Path]:
        """Whole snapshots, oldest first.

        Raises: OSError: their folder cannot be read.
        """
        found = []
        folders = self.checkpoints.iterdir() if self.checkpoints.exists() else ()
        for folder in folders:  # not glob, which finds nothing where it may not look
            prefix, _, step = folder.name.rpartition("-")  # one being written has another name
            if prefix == _SNAPSHOT_PREFIX and step.isdecimal() and folder.is_dir():
                found.append((int(step), folder))
        return [folder for _, folder in sorted(found)]

    def decide(self, *, resume: str = "auto", overwrite: bool = False) -> Opening:
        """What `open` would do with the folder as it is now; changes nothing.

        Args:
            resume: `auto` goes on with an unfinished run, else starts one; `never` needs a new or
                empty folder; `must` needs an unfinished run with a snapshot.
            overwrite: empty the folder first, provided that it is a run's.
        Raises: RunFolderError: the folder is in no state for it, or cannot be written.
        """
        assert resume in ("auto", "never", "must"), resume
        with self._errors_named():
            existing = next(p for p in (self.path, *self.path.parents) if p.exists())
            if not existing.is_dir():
                raise self._error(f"{existing} is a file, not a folder")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise self._error(f"{existing} cannot be written")
            entries, marker = self._entries(), self._marker()
            if not entries:
                if resume == "must":
                    raise self._error("there is no run to resume")
                return Opening.start
            if not marker:
                sample = ", ".join(entry.name for entry in entries[:3])
                sample += ", ..." if len(entries) > 3 else ""
                has_other = (self.path / _MARKER).exists()
                why = f": its {_MARKER} is not a run's, or is damaged" if has_other else ""
                raise self._error(
                    f"it has other files in it ({sample}) and is not the folder of a run{why}; so "
                    "it is left alone; choose another run_dir"
                )
            if overwrite:
                return Opening.overwrite
            if (found := marker.get("format_version")) != FORMAT_VERSION:
                raise self._error(
                    f"expected format {FORMAT_VERSION}, got {found}: another version of areal_sc "
                    "made it; go on with that one, choose another run_dir, or delete the run by "
                    "--overwrite"
                )
            return self._continuation(resume)

    def _continuation(self, resume: str) -> Opening:
        if self.summary_path.exists():
            raise self._error(
                "its run is finished; choose another run_dir, or delete the run by --overwrite"
            )
        if resume == "never":
            raise self._error(
                "it holds an unfinished run, and resume=never; choose another run_dir, go on with "
                "resume=auto, or delete the run by --overwrite"
            )
        if self.snapshots():
            return Opening.resume
        if resume == "must":
            raise self._error("its run has no snapshot to resume from")
        return Opening.restart

    def preview(
        self, *, config_text: str, resume: str = "auto", overwrite: bool = False
    ) -> Opening:
        """What `open` would do; changes nothing.

        Raises: RunFolderError: `open` would refuse.
        """
        opening = self.decide(resume=resume, overwrite=overwrite)
        with self._errors_named():
            if (self.path / _LOCK).exists():
                self._take_lock().close()
            if opening is Opening.resume:
                check_resumable(self._begun_with(), config_text)
        return opening

    def open(self, *, config_text: str, resume: str = "auto", overwrite: bool = False) -> Opening:
        """Takes the folder for this process and brings it into the state to run in.

        Args:
            config_text: the resolved configuration as YAML, kept as `config.yaml`.
            resume, overwrite: as in `decide`.
        Returns: what was done; `Opening.resume` asks the caller to go on from the last snapshot.
        Raises: RunFolderError: the folder is in use, not writable, in no state for it, or its run
            was begun with settings that cannot change.
        """
        self.decide(resume=resume, overwrite=overwrite)  # before anything is created
        with self._taken():
            opening = self.decide(resume=resume, overwrite=overwrite)  # now that no other can act
            if opening is Opening.overwrite:
                self._empty()
            elif opening is Opening.restart:
                self._set_aside()
            elif opening is Opening.resume:
                for change in check_resumable(self._begun_with(), config_text):
                    _logger.warning("setting changed since the run began: %s", change)
            self._mark()
            self.write_atomic(self.config_path, config_text.encode())
        return opening

    def lock(self, *, resume: str = "auto", overwrite: bool = False) -> None:
        """Takes the folder for this process: for a training loop that has no `Run`.

        What is in it stays, unless it is to be overwritten; snapshots are not read.

        Args:
            resume, overwrite: as in `decide`; but `must` is refused.
        Raises: RunFolderError: the folder is in use, not writable, in no state for it, holds a
            finished run, or other files.
        """
        if resume == "must":
            raise self._error(
                "a loop without a `Run` starts from nothing and cannot resume; write it with "
                "`with Run(config) as run:` (examples/own_loop.py), or leave out --resume"
            )
        self.decide(resume=resume, overwrite=overwrite)
        with self._taken():
            opening = self.decide(resume=resume, overwrite=overwrite)
            if opening is Opening.overwrite:
                self._empty()
            elif opening is Opening.resume:
                _logger.warning(
                    "%s has snapshots, but a loop without a `Run` starts from nothing", self.path
                )
            self._mark()

    def close(self) -> None:
        """Gives the folder up; nothing is deleted. Closing again does nothing."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_keys(self) -> None:
        """Deletes the keys of a run that has ended.

        By the owner of the folder, or when it has none: otherwise nothing is deleted. A folder that
        was deleted has none.
        """
        lock = self._lock or take_lock(self.path / _LOCK, fcntl.LOCK_EX)
        if lock is None:
            return
        self.keys_path.unlink(missing_ok=True)
        if lock is not self._lock:
            lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_atomic(self, path: str | Path, content: bytes) -> None:
        """Replaces a file: afterwards, crash or not, it holds the old or the new content, whole.

        Args:
            path: relative to the folder, or absolute; its parent exists.
        Raises: RunFolderError: it cannot be written, for example because the disk is full.
        """
        target = self.path / path
        try:
            write_atomic(target, content)
        except OSError as error:
            raise RunFolderError(f"cannot write {target}: {error.strerror}") from error

    def begin_lineage(self) -> int:
        """Number of a new history of weights, never given before in this folder.

        One begins whenever weights come from elsewhere than training: from the model that a run
        starts from, or from a snapshot. (lineage, policy version) names a policy.

        Raises: RunFolderError: the folder cannot be written to, or its count is damaged.
        """
        lineage = self.lineage + 1
        with self._errors_named():
            self.path.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
        self.write_atomic(_LINEAGE, f"{lineage}\n".encode())
        return lineage

    @property
    def lineage(self) -> int:
        """The number that `begin_lineage` gave last; 0: none.

        Raises: RunFolderError: the count is damaged.
        """
        path = self.path / _LINEAGE
        try:
            return int(path.read_text()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"cannot count in {path}: {error}; it must hold a number above all earlier ones"
            ) from error

    def check_lineage(self, begun: int) -> None:
        """Checks the count against a lineage that is known to have begun.

        Raises: RunFolderError: the count is damaged, and would give that number again.
        """
        if self.lineage < begun:
            raise RunFolderError(
                f"{self.path / _LINEAGE} is damaged: it holds {self.lineage}, but lineage {begun} "
                f"was begun; write {begun} into it"
            )

    @contextmanager
    def _taken(self) -> Iterator[None]:
        """Takes the folder, made if needed, and keeps it unless the block raises.

        Raises: RunFolderError: another process has it, or something cannot be written.
        """
        assert self._lock is None, f"run folder {self.path} is open already"
        try:
            with self._errors_named():
                self.path.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)
                self._lock = self._take_lock()
                (self.path / _LOCK).write_text(f"{os.getpid()}\n")  # for the message of others
                yield
        except BaseException:
            self.close()
            raise

    def _take_lock(self) -> HeldLock:
        path, give_up_s = self.path / _LOCK, time.monotonic() + _LOCK_WAIT_S
        while (lock := take_lock(path, fcntl.LOCK_EX)) is None:
            if time.monotonic() > give_up_s:
                pid = path.read_text(errors="replace").strip()
                owner = f"process {pid}" if pid else "another process"
                raise self._error(
                    f"{owner} is running in it; wait for it, stop it, or choose another run_dir"
                )
            time.sleep(0.05)
        return lock

    def _mark(self) -> None:
        """Makes the folder a run's."""
        marker = {"kind": "areal_sc run", "format_version": FORMAT_VERSION}
        self.write_atomic(_MARKER, f"{json.dumps(marker)}\n".encode())
        for name in _SUBFOLDERS:
            (self.path / name).mkdir(exist_ok=True, mode=OWNER_ONLY)

    def _begun_with(self) -> str:
        """The settings that the run was begun with; what is no text in it stays visible."""
        return self.config_path.read_text(errors="replace")

    def _error(self, text: str) -> RunFolderError:
        return RunFolderError(f"run folder {self.path}: {text}")

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise self._error(
                f"it cannot be used: {where}{error.strerror}; choose another run_dir"
            ) from error

    def _entries(self) -> list[Path]:
        """What lies in the folder, without lock and count, and without what a crash cut short."""
        if not self.path.is_dir():
            return []
        own = (_LOCK, _LINEAGE, f".{_MARKER}.", f".{_LINEAGE}.")
        return sorted(entry for entry in self.path.iterdir() if not entry.name.startswith(own))

    def _marker(self) -> dict[str, Any]:
        """What `run.json` says; nothing if it is not a run's."""
        try:
            marker = json.loads((self.path / _MARKER).read_text())
        except (OSError, ValueError):
            return {}
        is_marker = isinstance(marker, dict) and marker.get("kind") == "areal_sc run"
        return marker if is_marker else {}

    def _empty(self) -> None:
        """Deletes all but lock and count. The marker goes last, so that a crash leaves it."""
        for entry in self._entries():
            if entry.name != _MARKER:
                remove(entry)
        (self.path / _MARKER).unlink()

    def _set_aside(self) -> None:
        """Moves what an earlier start left to `previous/<n>/`."""
        previous = self.path / _PREVIOUS
        previous.mkdir(exist_ok=True, mode=OWNER_ONLY)
        numbers = [int(entry.name) for entry in previous.iterdir() if entry.name.isdecimal()]
        target = previous / str(max(numbers, default=0) + 1)  # the user may have deleted some
        target.mkdir(mode=OWNER_ONLY)
        for entry in self._entries():
            if entry.name not in (_MARKER, _PREVIOUS):
                entry.rename(target / entry.name)
