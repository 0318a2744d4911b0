"""Which agents of a run live, as its folder tells whoever looks into it, without keys.

    agents/<incarnation>.json    where an agent can be reached; for its owner alone

An agent keeps a lock on its file. The lock is the kernel's, so it ends with the agent, however that
ends: a file without a lock is that of an agent that is dead, whoever has its process id by now.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final, Self

from areal_sc.errors import RunFolderError
from areal_sc.system.file_lock import HeldLock, is_locked, take_lock
from areal_sc.system.process import OtherProcess, start_ticks
from areal_sc.system.waiting import polled

AGENTS: Final = "agents"

Place = tuple[str, str, int, int]
"""job, node, restart and step of an agent."""

_OWNER_ONLY: Final = 0o700
_LOOK_S: Final = 0.02


@dataclass(frozen=True)
class AgentFile:
    """What an agent tells of itself.

    Attributes:
        host: name of its machine.
        pid, start_ticks: of its process; together they name it until the machine starts again.
        address, incarnation: of its server.
        key: public key of its server.
        job, node, restart, step: what SLURM has started it in, where, how often it had started
            the job again, and in which step of that; "": it was not SLURM.
    """

    host: str
    pid: int
    start_ticks: int
    address: str
    incarnation: str
    key: str = ""
    job: str = ""
    node: str = ""
    restart: int = 0
    step: int = 0

    @classmethod
    def of_this_process(
        cls, address: str, incarnation: str, key: str = "", place: Place = ("", "", 0, 0)
    ) -> Self:
        pid = os.getpid()
        start = socket.gethostname(), pid, start_ticks(pid)
        job, node, restart, step = place
        return cls(*start, address, incarnation, key, job, node, restart, step)

    def write(self, run_dir: Path) -> HeldLock:
        """Makes the file; it is locked from its first moment, and whole.

        Returns: the lock, for as long as the process lives.
        Raises: OSError: the folder cannot be written.
        """
        folder = run_dir / AGENTS
        folder.mkdir(exist_ok=True, mode=_OWNER_ONLY)
        partial = folder / f".{self.incarnation}.partial"
        lock = take_lock(partial, fcntl.LOCK_EX)
        assert lock is not None, "nobody else knows this name"
        partial.write_text(json.dumps(asdict(self)))
        partial.rename(self.path(run_dir))
        return lock

    def path(self, run_dir: Path) -> Path:
        return run_dir / AGENTS / f"{self.incarnation}.json"

    def has_ended(self, run_dir: Path) -> bool:
        """Whether nothing of it is left that holds its lock."""
        return not is_locked(self.path(run_dir))

    @property
    def is_here(self) -> bool:
        """Whether it is on this machine."""
        return self.host == socket.gethostname()

    def process(self) -> OtherProcess | None:
        """Its process, if that is one of this machine."""
        return OtherProcess.find(self.pid, self.start_ticks) if self.is_here else None


def living_agents(run_dir: Path) -> list[AgentFile]:
    """Agents of the run that have not ended, the newest first.

    Raises: RunFolderError: the file of one is damaged. OSError: they cannot be read.
    """
    found = list[AgentFile]()
    for path in (run_dir / AGENTS).glob("[!.]*.json"):
        if is_locked(path):
            with suppress(FileNotFoundError):  # it has ended meanwhile
                found.append(_read(path))
    return sorted(found, key=lambda agent: agent.start_ticks, reverse=True)


def delete_files_of_dead_agents(run_dir: Path) -> None:
    """Raises: OSError: they cannot be deleted."""
    for path in (run_dir / AGENTS).glob("*"):
        if not is_locked(path):
            path.unlink(missing_ok=True)


def end_agents(run_dir: Path, grace_s: float, *, but_of_jobs: bool = False) -> None:
    """Ends the agents of a run with all their workers, without asking them.

    Args:
        but_of_jobs: those that SLURM has started are left out.
    Raises: RunFolderError: one is on another machine, or does not end.
    """
    for agent in living_agents(run_dir):
        if but_of_jobs and agent.job:
            continue
        if process := agent.process():
            process.end(grace_s)
        # what an agent has started ends right behind it, and holds its lock until then
        limit_s = grace_s if agent.is_here else 0.0
        if not polled(partial(agent.has_ended, run_dir), limit_s, _LOOK_S):
            raise RunFolderError(
                f"run folder {run_dir}: workers of its run live on {agent.host} (agent: process "
                f"{agent.pid}); end them by `python -m areal_sc stop {run_dir}`"
            )


def _read(path: Path) -> AgentFile:
    try:
        content = json.loads(path.read_text())
        return AgentFile(**content)
    except (ValueError, TypeError) as error:
        raise RunFolderError(
            f"{path} is damaged, and its agent lives: end that agent (`pgrep -f areal_sc` shows "
            "it), then start the run again"
        ) from error
