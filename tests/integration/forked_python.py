"""What `python FILE ARGUMENT ...` does for who types it, as a fork: see `agent_forks`.

Any other command is executed.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from agent_forks import ADDRESS, ONE_THREAD, Fork


def main(words: list[str]) -> int:
    command = [sys.executable, *words]
    if words[0].endswith(".py"):
        fork = None
        with suppress(RuntimeError, OSError):
            env = ONE_THREAD | os.environ
            fork = Fork(os.environ[ADDRESS], command, os.getcwd(), env, [0, 1, 2])
        if fork is not None:
            code = fork.wait()
            return code if code >= 0 else 128 - code
    os.execv(sys.executable, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
