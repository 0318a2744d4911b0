"""The processes of a server that runs on this machine, as /proc shows them.

A server is a session of its own: the HTTP process leads it, the schedulers compute. Whether a
scheduler still does anything can be seen here when it does not answer.
"""

from __future__ import annotations

import os
import re
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_SCHEDULER_TITLE = "scheduler"
_STOPPED_STATES = ("T", "t")  # by a signal, by a debugger
_ENDED_STATES = ("Z", "X")
_LOADS_FILE = re.compile(r" (/dev/shm/sglang_loads_\S+\.shm)$", re.MULTILINE)
"""A file in which a server's processes tell each other how busy they are."""


@dataclass(frozen=True)
class ProcessState:
    """One look at one process.

    Attributes:
        session: process id of the session's leader.
        cpu_ticks: user and system time that it has used.
        is_stopped: it was stopped by a signal.
    """

    session: int
    cpu_ticks: int
    is_stopped: bool


def read_process(pid: int) -> ProcessState | None:
    """The process's state now, or None when there is none, or only what its parent must reap."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the name stands in parentheses and may hold anything
    fields = stat.rpartition(")")[2].split()
    if fields[0] in _ENDED_STATES:
        return None
    return ProcessState(
        session=int(fields[3]),
        cpu_ticks=int(fields[11]) + int(fields[12]),
        is_stopped=fields[0] in _STOPPED_STATES,
    )


def session_members(session: int) -> list[int]:
    """Process ids of a session; those that ended and are not reaped are left out."""
    found = []
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            state = read_process(int(entry.name))
            if state is not None and state.session == session:
                found.append(int(entry.name))
    return found


def find_schedulers(session: int) -> list[int]:
    """The members of a server's session that compute; SGLang gives them that title."""
    return [pid for pid in session_members(session) if _SCHEDULER_TITLE in _title(pid)]


def shared_files(session: int) -> set[Path]:
    """Files in shared memory that a server's processes map, and leave when they are killed.

    Their names are random, one a server, so no other server has them.
    """
    found = set()
    for pid in session_members(session):
        try:
            maps = (_PROC / str(pid) / "maps").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended
            continue
        found |= {Path(name) for name in _LOADS_FILE.findall(maps)}
    return found


def kill_session(session: int) -> None:
    """Kills all members of a session; nothing when there is none left.

    The leader first: it would take the end of the others for an accident.
    """
    members = sorted(session_members(session), key=lambda pid: pid != session)
    for pid in members:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _title(pid: int) -> str:
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
