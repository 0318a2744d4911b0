from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

from areal_sc import open_files
from areal_sc.errors import TransportError, WorkerStartError

RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))
from areal_sc.open_files import raise_limit
raise_limit()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_the_limit_is_raised_as_far_as_is_allowed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RAISE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "512 512\n"


def test_an_error_of_the_limit_gets_advice_however_it_is_wrapped() -> None:
    too_many = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    wrapped = TransportError("the bulk socket cannot be opened")
    wrapped.__cause__ = too_many
    limit = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    of_worker = WorkerStartError("train/0 ended", log_tail=["Traceback", f"OSError: {too_many}"])
    for error in (too_many, wrapped, of_worker, TransportError(f"rollout/0: {too_many}")):
        advice = open_files.advice_on(error)
        assert advice is not None
        assert limit in advice
        assert "ulimit" in advice
    assert open_files.advice_on(OSError(errno.ENOENT, "no such file")) is None
