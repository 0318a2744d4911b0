from __future__ import annotations

import math
import os
import resource
import subprocess
import sys

import pytest

from areal_sc.process import bury_left, max_more_tasks

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


def test_processes_and_threads_are_counted_where_the_user_has_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for root, nor for who may do more than other users."""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1000, 1000))
    monkeypatch.setattr("areal_sc.process._ABOVE_LIMITS", 0)
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert max_more_tasks() == math.inf
    user = os.stat("/proc/self").st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert 0 <= max_more_tasks() <= 1000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert max_more_tasks() == math.inf


def test_the_dead_that_nobody_waits_for_are_reaped_at_the_second_look() -> None:
    pid = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], os.environ)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    left = bury_left(set())
    assert pid in left, "who has started it may wait for it now"
    assert pid not in bury_left({pid})
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, 0)
