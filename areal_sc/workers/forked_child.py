"""What a process does that was forked from a server, before it runs what it was forked for."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from areal_sc.errors import ArealError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def run_child(
    target: str,
    spec: dict[str, Any],
    output: int,
    *,
    parent_pid: int | None,
    close_sockets: Callable[[], None],
) -> NoReturn:
    """Runs `target` and ends the process with what that returns; never comes back.

    Args:
        target: module:function(spec) -> exit code.
        output: file descriptor that takes the process's output.
        parent_pid: SIGKILL for this process when that one dies; None: it lives on.
        close_sockets: closes what the parent serves with.
    """
    returncode = 1
    try:
        os.setsid()
        if parent_pid is not None:
            die_with_parent(parent_pid)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        close_sockets()
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(null)
        # whatever stood in their place here, the child writes to its own log, line by line
        sys.stdout, sys.stderr = (
            open(fd, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
            for fd in (1, 2)
        )
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()
        returncode = _run(target, spec)
    except SystemExit as request_to_end:
        code = request_to_end.code
        returncode = code if isinstance(code, int) else int(code is not None)
    except ArealError as error:
        traceback.print_exc()
        returncode = error.exit_code
    except BaseException:  # the process's main: what ends it is in its log
        traceback.print_exc()
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(returncode)


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent dies, or at once if it already has."""
    if _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it died before the request was made
        os._exit(1)


def _run(target: str, spec: dict[str, Any]) -> int:
    module_name, _, function_name = target.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    return int(function(spec) or 0)
