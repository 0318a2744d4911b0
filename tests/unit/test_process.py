from __future__ import annotations

import os
import subprocess
import sys

import pytest

from areal_sc.process import bury_left

RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from areal_sc.process import allow_open_files
allow_open_files()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_is_allowed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "512 512\n"


def test_the_dead_that_nobody_waits_for_are_reaped_at_the_second_look() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    left = bury_left(set())
    assert pid in left, "who has started it may wait for it now"
    assert pid not in bury_left({pid})
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
