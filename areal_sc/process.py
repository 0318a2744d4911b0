"""What a process does with itself on Linux, and how it ended."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import signal
from pathlib import Path
from typing import Final

MAX_OPEN_FILES: Final = 1 << 20
"""Linux allows no more by default. A higher limit slows programs that try every descriptor."""

_PR_SET_PDEATHSIG: Final = 1
_MAX_NAME_CHARS: Final = 15

logger = logging.getLogger(__name__)


def exit_text(code: int) -> str:
    """`exit code 1` or `signal 9 (SIGKILL)`, from an exit code as `subprocess` gives it."""
    return f"exit code {code}" if code >= 0 else f"signal {-code} ({signal.Signals(-code).name})"


def name_process(name: str) -> None:
    """What `ps -e` and `top` show for this process; of a long name they show the end."""
    Path("/proc/self/comm").write_text(f"areal:{name}"[-_MAX_NAME_CHARS:])


def die_with(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, or at once if it already has."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request was made
        os._exit(1)


def allow_open_files() -> None:
    """Raises the limit of open files and sockets, also for later children, to the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # forbidden, in a sandbox say
            logger.warning("the limit of open files stays at %d: %s", soft, error)


def open_files_advice() -> str:
    """What to do where too many files are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        f"this process and each worker may have {soft} files and sockets open at one time, and the "
        f"hard limit is {hard} (ulimit -Hn); raise it (`nofile` in /etc/security/limits.conf, "
        "docker run --ulimit nofile=65536), or use fewer workers"
    )
