"""Which process runs in a run folder, and since when: one at a time, and each has its term.

    .lock    locked by that process; the kernel ends the lock with it, however it ends
    .term    counts the starts, and says which process the newest is

The lock keeps a second process out. Where that does not help, since the lock file was deleted, say,
or the folder is on a file system without locks between machines, the terms do: a process whose term
is not the newest changes nothing any more. Two starts may count at one moment and get the same
number; then the one counts whose name the file has.

A path is only a name. Who writes to a run folder looks first whether it still names that folder.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from areal_sc.errors import RunFolderError, StaleTerm
from areal_sc.ids import random_id
from areal_sc.system.durable import write_atomic
from areal_sc.system.file_lock import HeldLock, take_lock
from areal_sc.system.process import OtherProcess, is_stopped, start_ticks
from areal_sc.system.waiting import polled

LOCK: Final = ".lock"
TERM: Final = ".term"

LOCK_WAIT_S: Final = 1.0
"""The agent of a killed run holds the lock for a moment, while it cleans up."""

_POLL_S: Final = 0.05


@dataclass(frozen=True)
class Owner:
    """The process that runs in a folder, or did so last.

    Attributes:
        term: number of its start, from 1.
        host, pid, start_ticks: of the process; see `start_ticks`.
        began_s: Unix time.
        name: of this start alone; "": an older areal_sc gave none.
    """

    term: int
    host: str
    pid: int
    start_ticks: int
    began_s: float
    name: str = ""

    @classmethod
    def read(cls, run_dir: Path) -> Owner | None:
        """The newest one; None: there has been none.

        Raises: RunFolderError: the file is damaged.
        """
        path = run_dir / TERM
        try:
            owner = cls(**json.loads(path.read_text()))
            if isinstance(owner.term, int) and isinstance(owner.pid, int):
                return owner
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError):
            pass
        raise RunFolderError(
            f"{path} is damaged: it does not say which process runs in the folder. End what still "
            "runs of it, then delete this file"
        )

    @property
    def age(self) -> str:
        """How long ago it began."""
        seconds = max(0.0, time.time() - self.began_s)
        for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
            if seconds >= length_s:
                return f"{seconds / length_s:.1f} {unit}"
        return f"{seconds:.0f} s"

    def __str__(self) -> str:
        words = f"process {self.pid} is running in it, on {self.host}, for {self.age}"
        if self._is_here and is_stopped(self.pid):
            words += f", and is stopped now (`kill -CONT {self.pid}` lets it go on)"
        return words

    def go_on(self) -> bool:
        """Lets the process go on, if a signal has stopped it on this machine; returns whether."""
        process = OtherProcess.find(self.pid, self.start_ticks) if self._is_here else None
        if process is None:
            return False
        was_stopped = is_stopped(self.pid)
        if was_stopped:
            process.send(signal.SIGCONT)
        return was_stopped

    @property
    def may_live(self) -> bool:
        """False: it has ended. That of another machine cannot be told."""
        return self.host != socket.gethostname() or self._is_here

    @property
    def _is_here(self) -> bool:
        is_host = self.host == socket.gethostname()
        return is_host and start_ticks(self.pid) == self.start_ticks


class FolderPlace:
    """The folder that a path names now, wherever it is moved to.

    It keeps its number as long as a file in it is open, as the lock of a run folder is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._find()

    def check(self) -> None:
        """Raises: RunFolderError: the path names another folder, or none."""
        with suppress(OSError):  # a file server that does not answer has moved nothing
            if self._find() != self._number:
                raise RunFolderError(
                    f"run folder {self._path}: it was moved or deleted while the run was in it, so "
                    "the run ends and writes to no other folder of this name. Move it back, and "
                    "the same command goes on from its newest snapshot"
                )

    def _find(self) -> tuple[int, int] | None:
        with suppress(FileNotFoundError, NotADirectoryError):
            found = self._path.stat()
            return found.st_dev, found.st_ino
        return None


@dataclass(frozen=True)
class RunTerm:
    """The term of a process in a run folder.

    Attributes:
        number: every request of the process carries it.
        owner: name of the start; see `Owner`.
    """

    number: int
    run_dir: Path
    owner: str
    _place: FolderPlace

    @classmethod
    def begin(cls, run_dir: Path) -> RunTerm:
        """The next term, for this process. It is on the disk when this returns.

        Raises: RunFolderError: the count is damaged. OSError: it cannot be written. StaleTerm:
            another process has counted at the same time.
        """
        last, pid = Owner.read(run_dir), os.getpid()
        number = 1 if last is None else last.term + 1
        start = socket.gethostname(), pid, start_ticks(pid), time.time(), random_id()
        owner = Owner(number, *start)
        write_atomic(run_dir / TERM, json.dumps(asdict(owner)).encode())
        term = cls.of(owner, run_dir)
        term.check()
        return term

    @classmethod
    def of(cls, owner: Owner, run_dir: Path) -> RunTerm:
        """The term of a process which may have ended, to act in its name."""
        return cls(owner.term, run_dir, owner.name, FolderPlace(run_dir))

    @property
    def is_over(self) -> bool:
        """Another process has begun a later one. A damaged file says of none."""
        with suppress(RunFolderError):
            return self._newer is not None
        return False

    @property
    def _newer(self) -> Owner | None:
        newest = Owner.read(self.run_dir)
        is_newer = newest is not None and (
            newest.term > self.number or (newest.term == self.number and newest.name != self.owner)
        )
        return newest if is_newer else None

    def check(self) -> None:
        """Raises: StaleTerm: it is over; says who has taken the run over. RunFolderError: the
        folder was moved or deleted."""
        self._place.check()
        if self.is_over:
            raise self.stale()

    def stale(self) -> StaleTerm:
        """Why this process can do nothing any more."""
        newest, who = self._newer, ""
        if newest is not None:
            who = f" (term {newest.term}: process {newest.pid} on {newest.host}, for {newest.age})"
        return StaleTerm(
            f"run folder {self.run_dir}: another start of the script has taken the run over{who}; "
            f"this one, of term {self.number}, ends and leaves everything to it"
        )


def take_folder(run_dir: Path) -> HeldLock:
    """The folder's lock, for this process.

    Raises: RunFolderError: another process has it.
    """
    lock = polled(lambda: take_lock(run_dir / LOCK, fcntl.LOCK_EX), LOCK_WAIT_S, _POLL_S)
    if lock is None:
        owner = Owner.read(run_dir)
        who = str(owner) if owner and owner.may_live else "another process is running in it"
        raise RunFolderError(
            f"run folder {run_dir}: {who}; wait for it, stop it by `python -m areal_sc stop "
            f"{run_dir}`, or choose another run_dir"
        )
    return lock
