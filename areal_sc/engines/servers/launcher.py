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

PR_SET_PDEATHSIG = 1
NOT_INSTALLED = 66  # exit code: the interpreter does not have the servers' program


def main() -> None:
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
