"""Runs in the interpreter of the servers' environment, as the main of a server's process.

Its arguments come as JSON on standard input, and not on the command line, which every user of the
machine can read: the server's API key is one of them. It needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import runpy
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1
END_SIGNAL = signal.SIGRTMIN  # as an agent's: nobody else sends it
OF_SCRIPT = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOT_INSTALLED = 66  # exit code: the interpreter does not have the servers' program


def end_by_sigterm(number: int, frame: FrameType | None) -> None:
    """The server ends as it would without `leave_signals_to_script`."""
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def leave_signals_to_script() -> None:
    """The script answers signals that are sent to all processes of a run.

    They are blocked, also in all that this process starts: a server takes its own handlers. By
    SIGQUIT the processes of a server tell each other of a failure.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, OF_SCRIPT)
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(END_SIGNAL, end_by_sigterm)


def main() -> None:
    leave_signals_to_script()
    start = json.load(sys.stdin)
    # The kernel kills this process when the worker's thread that started it ends, however that
    # happens; its own processes have to ask for the same of this one.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != start["parent_pid"]:
        sys.exit("the worker that started this server is gone")
    sys.path.pop(0)  # this file's folder, whose modules are not meant for the server
    if importlib.util.find_spec(start["module"].partition(".")[0]) is None:
        sys.exit(NOT_INSTALLED)
    sys.argv[1:] = start["arguments"]
    runpy.run_module(start["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
