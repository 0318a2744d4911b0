from __future__ import annotations

import subprocess
import sys

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
