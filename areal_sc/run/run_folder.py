"""The folder that a run lives in: one owner at a time, and files that survive a crash.

What lies in it, `run_files` says.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import TypedDict, Unpack

from areal_sc.config.loading.differences import check_resumable
from areal_sc.errors import CommandError, NoRunFolder, RunFolderError
from areal_sc.run.agent_files import (
    AGENTS,
    AgentFile,
    delete_files_of_dead_agents,
    end_agents,
    living_agents,
)
from areal_sc.run.private_folder import make_private
from areal_sc.run.run_begin import SETTINGS, RunBegin
from areal_sc.run.run_files import RunFiles
from areal_sc.run.run_marker import COPY, MARKER, RunMarker
from areal_sc.run.run_owner import LOCK, TERM, Owner, RunTerm, take_folder
from areal_sc.system.durable import delete_unfinished, os_errors_as, remove, set_aside, write_atomic
from areal_sc.system.file_lock import HeldLock, is_locked, take_lock

FORMAT_VERSION = 5
"""Format of what a run resumes from. It is raised when an older areal_sc could not read it."""

OWNER_ONLY = 0o700

END_LIMIT_S = 10.0
"""An agent ends its workers in a few seconds, and is killed if it takes longer."""

CONFIG = "config.yaml"
_SUBFOLDERS = ("logs", "checkpoints", "sources")
_PREVIOUS = "previous"
_MENDED = f'{{"kind": "areal_sc run", "format_version": {FORMAT_VERSION}}} in it makes it one again'

_logger = logging.getLogger(__name__)


class Opening(Enum):
    """What opening a folder does."""

    start = "start a new run"
    resume = "go on from the last snapshot"
    attach = "go on with the workers that live, of a start that was killed"
    restart = "start again, because an earlier start left no snapshot"
    overwrite = "empty the folder and start a new run"


_GOES_ON = (Opening.attach, Opening.resume)


class HowToOpen(TypedDict, total=False):
    """How a folder is to be opened.

    Attributes:
        resume: `auto`, unless it is said, goes on with an unfinished run, else starts one; `never`
            needs a new or empty folder; `must` needs an unfinished run with a snapshot.
        overwrite: empty the folder first, provided that it is a run's.
        total_steps: planned ones; a finished run with fewer goes on. None: not known.
    """

    resume: str
    overwrite: bool
    total_steps: int | None


class RunFolder(RunFiles):
    """The durable files of one run; construct it anywhere, `open` it to own it.

    Attributes:
        term: of this process, once it has opened the folder.
        warnings: what people should know of the folder as it was found.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.term: RunTerm | None = None
        self.warnings: list[str] = []
        self._lock: HeldLock | None = None

    def decide(self, **wanted: Unpack[HowToOpen]) -> Opening:
        """What `open` would do with the folder as it is now; changes nothing.

        Raises: RunFolderError: the folder is in no state for it, or cannot be written. NoRunFolder:
            it cannot be made.
        """
        resume = wanted.get("resume", "auto")
        assert resume in ("auto", "never", "must"), resume
        with self._errors_named(NoRunFolder):  # a name may be too long
            existing = next(p for p in (self.path, *self.path.parents) if p.exists())
        with self._errors_named():
            if not existing.is_dir():
                raise self._error(f"{existing} is a file, not a folder", NoRunFolder)
            if not os.access(existing, os.W_OK | os.X_OK):
                raise self._error(f"{existing} cannot be written", NoRunFolder)
            entries, marker = self._entries(), self.marker()
            if not entries:
                if resume == "must":
                    raise self._error("there is no run to resume")
                return Opening.start
            if marker is None:
                sample = ", ".join(entry.name for entry in entries[:3])
                sample += ", ..." if len(entries) > 3 else ""
                why = f": its {MARKER} is not a run's, or is damaged ({_MENDED})"
                why = why if (self.path / MARKER).exists() else ""
                raise self._error(
                    f"it has other files in it ({sample}) and is not the folder of a run{why}; so "
                    "it is left alone; choose another run_dir"
                )
            if wanted.get("overwrite"):
                return Opening.overwrite
            if (found := marker.format_version) != FORMAT_VERSION:
                raise self._error(
                    f"expected format {FORMAT_VERSION}, got {found}: another version of areal_sc "
                    "made it; go on with that one, choose another run_dir, or delete the run by "
                    "--overwrite"
                )
            files = self.config_path, self.begun_path, self.path / MARKER, self.path / COPY
            for path in files:
                if path.is_dir():
                    raise self._error(f"{path} is a folder, not a file; move it away")
            return self._continuation(resume, wanted.get("total_steps"))

    def _continuation(self, resume: str, total_steps: int | None) -> Opening:
        snapshots = self.snapshots()
        num_done = int(snapshots[-1].name.rpartition("-")[2]) if snapshots else 0
        if self.summary_path.exists():
            with suppress(ValueError, KeyError, TypeError):  # it is damaged
                num_done = max(num_done, json.loads(self.summary_path.read_bytes())["num_steps"])
        is_longer = snapshots and total_steps is not None and total_steps > num_done
        if self.summary_path.exists() and not is_longer:
            way_on = f"raise total_steps above {num_done}, " if snapshots else ""
            raise self._error(
                f"its run is finished; {way_on}choose another run_dir, or delete the run by "
                "--overwrite"
            )
        if total_steps is not None and total_steps < num_done:
            raise self._error(
                f"expected total_steps of at least {num_done}, which are trained already, got "
                f"{total_steps}; raise it, or choose another run_dir"
            )
        if resume == "never":
            raise self._error(
                "it holds an unfinished run, and resume=never; choose another run_dir, go on with "
                "resume=auto, or delete the run by --overwrite"
            )
        if living_agents(self.path) or self.joined_path.exists():  # those may live
            return Opening.attach
        if snapshots:
            return Opening.resume
        if resume == "must":
            raise self._error("its run has no snapshot to resume from")
        return Opening.restart

    def preview(self, *, config_text: str, **wanted: Unpack[HowToOpen]) -> Opening:
        """What `open` would do; changes nothing. A folder that is not there is made, and deleted.

        Raises: RunFolderError: `open` would refuse.
        """
        opening = self.decide(**wanted)
        missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
        try:
            self._make()
        finally:
            for folder in missing:
                with suppress(OSError):  # it could not be made, or another run has begun in it
                    folder.rmdir()
        with self._errors_named():
            if (self.path / LOCK).exists():
                take_folder(self.path).close()
            Owner.read(self.path)  # the next term counts from it
            if opening in _GOES_ON:
                self._check_settings(config_text)
        return opening

    def open(self, *, config_text: str, **wanted: Unpack[HowToOpen]) -> Opening:
        """Takes the folder for this process and brings it into the state to run in.

        Args:
            config_text: the resolved configuration as YAML, kept as `config.yaml`.
        Returns: what was done; `Opening.resume` asks the caller to go on from the last snapshot,
            `Opening.attach` to take over the workers that live, or else to do the same.
        Raises: RunFolderError: the folder is in use, not writable, in no state for it, or its run
            was begun with settings that cannot change.
        """
        with self._taken(wanted) as opening:
            if opening is Opening.overwrite:
                self.warnings.append(f"the earlier run in {self.path} was deleted: overwrite")
            elif opening is Opening.restart:
                self._set_aside()
                self.warnings.append(
                    f"an earlier start in {self.path} left no snapshot, so the run starts again "
                    "from nothing; what is left of that start is in previous/"
                )
            elif opening in _GOES_ON:
                for change in self._check_settings(config_text):
                    _logger.warning("setting changed since the run began: %s", change)
                self.summary_path.unlink(missing_ok=True)  # a finished run gets more steps
            if not self._begun_with():
                begun = self._last_settings() if opening in _GOES_ON else ""
                RunBegin(self.begun_path).note_begin({SETTINGS: {CONFIG: begun or config_text}})
            self._mark(config_text)
            self.write_atomic(self.config_path, config_text.encode())
        return opening

    def lock(self, **wanted: Unpack[HowToOpen]) -> None:
        """Takes the folder for this process: for a training loop that has no `Run`.

        What is in it stays, unless it is to be overwritten; snapshots are not read.

        Raises: RunFolderError: the folder is in use, not writable, in no state for it, holds a
            finished run, or other files.
        """
        if wanted.get("resume") == "must":
            raise self._error(
                "a loop without a `Run` starts from nothing and cannot resume; write it with "
                "`with Run(config) as run:` (examples/own_loop.py), or leave out --resume"
            )
        with self._taken(wanted) as opening:
            if opening in (Opening.resume, Opening.restart):
                self.begun_path.unlink(missing_ok=True)
                what = "held a run whose workers are gone: this loop starts from nothing"
                _logger.warning("%s %s", self.path, what)
            self._mark()

    def hold(self, last: Owner | None) -> None:
        """Takes the folder in the name of its last owner, to end what that has left.

        No other process can take it meanwhile, unless there are no locks between its machine and
        this one: then this term is over.

        Args:
            last: who has ended.
        Raises: RunFolderError: a process has it, or it cannot be written. StaleTerm: one has had it
            since.
        """
        assert self._lock is None, f"run folder {self.path} is open already"
        with self._errors_named():
            self._lock = take_folder(self.path)
        self.term = None if last is None else RunTerm.of(last, self.path)
        self.check_term()

    def check_term(self) -> None:
        """Raises: StaleTerm: another process has taken the run over. RunFolderError: the folder was
        moved or deleted."""
        if self.term is not None:
            self.term.check()

    def begin_lineage(self) -> int:
        """Number of a new history of weights, never given before in this folder.

        A history, or lineage, begins whenever weights come from elsewhere than training: from the
        model that a run starts from, or from a snapshot. (lineage, policy version) names a policy.

        Raises: RunFolderError: the folder cannot be written to, or its count is damaged.
        """
        self.check_term()  # else one that was moved away would be made anew
        lineage = self.newest_lineage() + 1
        self._make()
        self.write_atomic(self.lineage_path, f"{lineage}\n".encode())
        return lineage

    def newest_lineage(self) -> int:
        """The number that `begin_lineage` gave last; 0: none.

        Raises: RunFolderError: the count is damaged.
        """
        path = self.lineage_path
        try:
            return int(path.read_text()) if path.exists() else 0
        except (OSError, ValueError) as error:
            raise RunFolderError(
                f"{path} is damaged ({error}): write a number above all earlier ones into it, "
                "9999 say"
            ) from error

    def check_lineage(self, begun: int) -> None:
        """Checks the count against a lineage that is known to have begun.

        Raises: RunFolderError: the count is damaged, and would give that number again.
        """
        if (newest := self.newest_lineage()) < begun:
            raise RunFolderError(
                f"{self.lineage_path} is damaged: it holds {newest}, but lineage {begun} was "
                f"begun; write {begun} into it"
            )

    def close(self) -> None:
        """Gives the folder up; nothing is deleted. Closing again does nothing."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def is_taken(self) -> bool:
        """Whether a process has the folder open, this one or another."""
        return is_locked(self.path / LOCK)

    def remove_keys(self, agent: AgentFile | None = None) -> None:
        """Deletes the keys of a run that has ended, and what is left of its agents' files.

        By the owner of the folder, or when it has none: otherwise nothing is deleted. A folder that
        was deleted has none. As long as agents live, or may, the next start needs the keys.

        Args:
            agent: the one that calls, as the last thing that it does: it counts as ended.
        """
        # several agents may end at one time
        lock = self._lock or take_lock(self.path / LOCK, fcntl.LOCK_SH)
        if agent is not None:
            agent.path(self.path).unlink(missing_ok=True)
        if lock is None or (self.term and self.term.is_over):
            return
        if lock is self._lock:
            self.joined_path.unlink(missing_ok=True)
        delete_files_of_dead_agents(self.path)
        if not (living_agents(self.path) or self.joined_path.exists()):
            self.keys_path.unlink(missing_ok=True)
            self.agents_path.unlink(missing_ok=True)
            delete_unfinished(self.sources)  # of workers; the script may still write the rest
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
            StaleTerm: another process has taken the run over.
        """
        target = self.path / path
        self.check_term()
        with os_errors_as(RunFolderError, f"cannot write {target}"):
            write_atomic(target, content)

    @contextmanager
    def _taken(self, wanted: HowToOpen) -> Iterator[Opening]:
        """Takes the folder, made or emptied if needed, and keeps it unless the block raises.

        Raises: RunFolderError: another process has it, it is in no state for what is wanted, or
            something cannot be written.
        """
        self.decide(**wanted)  # before anything is created
        assert self._lock is None, f"run folder {self.path} is open already"
        try:
            self._make()
            with self._errors_named():
                self._lock = take_folder(self.path)
                make_private(self.path, self.warnings.append)
                self.term = RunTerm.begin(self.path)
                opening = self.decide(**wanted)  # now that no other can act
                if opening is Opening.overwrite:
                    self._empty()
                if opening is not Opening.attach:  # no worker of it lives
                    for folder in (self.path, self.sources, self.histories, self.ledger):
                        delete_unfinished(folder)
                yield opening
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        """Raises: NoRunFolder."""
        with self._errors_named(NoRunFolder):
            self.path.mkdir(parents=True, exist_ok=True, mode=OWNER_ONLY)

    def _mark(self, settings: str | None = None) -> None:
        """Makes the folder a run's."""
        self.warnings += RunMarker(FORMAT_VERSION, settings).write(self.path, self.write_atomic)
        for name in _SUBFOLDERS:
            (self.path / name).mkdir(exist_ok=True, mode=OWNER_ONLY)

    def _check_settings(self, config_text: str) -> list[str]:
        """Compares the settings with those that the run was begun with: `check_resumable`."""
        begun = self._begun_with() or self._last_settings()
        if not begun:
            return [f"not known, as {self.config_path} is gone; the command's own settings count"]
        return check_resumable(begun, config_text)

    def _begun_with(self) -> str:
        """The settings that the run was begun with; "" where an older areal_sc began it."""
        return (RunBegin(self.begun_path).noted(SETTINGS) or {}).get(CONFIG, "")

    def _last_settings(self) -> str:
        """The settings of the start before this one; an older areal_sc kept them in `config.yaml`
        alone. What is no text in it stays visible; "" if it is gone."""
        marker = self.marker()
        if marker is not None and marker.settings is not None:
            return marker.settings
        if self.config_path.exists():
            return self.config_path.read_text(errors="replace")
        return ""

    def _error(self, text: str, kind: type[RunFolderError] = RunFolderError) -> RunFolderError:
        return kind(f"run folder {self.path}: {text}")

    @contextmanager
    def _errors_named(self, kind: type[RunFolderError] = RunFolderError) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            raise self._error(
                f"it cannot be used: {where}{error.strerror}; choose another run_dir", kind
            ) from error

    def _entries(self) -> list[Path]:
        """What lies in the folder, without what outlives the run or its start, and without what a
        crash cut short."""
        if not self.path.is_dir():
            return []
        paths = self.lineage_path, self.jobs_path, self.join_path, self.joined_path, self.nonce_path
        kept = (TERM, *(path.name for path in paths))
        own = (LOCK, COPY, *kept, f".{COPY}.", *(f".{name}" for name in kept))
        return sorted(entry for entry in self.path.iterdir() if not entry.name.startswith(own))

    def marker(self) -> RunMarker | None:
        """What makes it a run's; None: it is none."""
        return RunMarker.read(self.path)

    def _empty(self) -> None:
        """Ends the run, if it lives, and deletes all but lock and count.

        The marker goes last, so that a crash leaves it.
        """
        end_agents(self.path, END_LIMIT_S)
        for entry in self._entries():
            if entry.name != MARKER:
                remove(entry)
        for name in (MARKER, COPY):
            (self.path / name).unlink(missing_ok=True)

    def _set_aside(self) -> None:
        """Moves what an earlier start left to `previous/<n>/`, once none of it runs any more."""
        end_agents(self.path, END_LIMIT_S)
        # jobs may wait, whose agents have these keys
        apart = (self.keys_path, self.pause_path, self.agents_path, self.serving)
        kept = (MARKER, _PREVIOUS, AGENTS, *(path.name for path in apart))
        set_aside([e for e in self._entries() if e.name not in kept], self.path / _PREVIOUS)


def check_is_folder(path: Path) -> None:
    """Raises: CommandError: there is none, or it may not be read."""
    if not path.is_dir():
        raise CommandError(f"there is no folder {path}; expected that of a run (`run_dir`)")
    if not os.access(path, os.R_OK | os.X_OK):
        raise CommandError(f"{path} may not be read by you; whoever owns it can")


def check_is_run(folder: RunFolder) -> None:
    """Raises: CommandError: it is not the folder of a run, or may not be read."""
    check_is_folder(folder.path)
    if folder.marker() is None:
        raise CommandError(f"{folder.path} is not the folder of a run: it has no sound run.json")
