"""What Linux lets a process do with itself, and how it ended. No torch."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
_MAX_NAME_CHARS: Final = 15


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
