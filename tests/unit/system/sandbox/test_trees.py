"""What a program uses and leaves, counted."""

from __future__ import annotations

import mmap
import subprocess
import sys
from pathlib import Path

from areal_sc.system.sandbox.trees import deleted_bytes

MAPS_ALONE = """
import mmap, os, sys
held = mmap.mmap(int(sys.argv[1]), 0)
os.closerange(3, 1 + max(map(int, os.listdir("/proc/self/fd"))))
print("mapped", flush=True)
sys.stdin.read()
"""
"""Maps a file that is open, and closes all that it has open."""


def test_a_deleted_file_that_is_mapped_counts(tmp_path: Path) -> None:
    path, size = tmp_path / "f", 1 << 20
    with path.open("w+b") as file:
        file.write(b"x" * size)
        file.flush()
        held = mmap.mmap(file.fileno(), size)
        with subprocess.Popen(
            [sys.executable, "-c", MAPS_ALONE, str(file.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[file.fileno()],
        ) as program:
            assert program.stdin is not None
            assert program.stdout is not None
            assert program.stdout.readline() == b"mapped\n"
            path.unlink()
            assert deleted_bytes([program.pid]) == 0, "this process has it too"
            file.close()
            held.close()
            assert deleted_bytes([program.pid]) == size
            program.stdin.close()
    assert deleted_bytes([program.pid]) == 0
