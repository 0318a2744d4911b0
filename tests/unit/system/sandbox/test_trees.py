"""What a program uses and leaves, counted."""

from __future__ import annotations

import gc
import mmap
import os
import signal
from pathlib import Path

from areal_sc.system.sandbox.trees import deleted_bytes


def test_a_deleted_file_that_is_mapped_counts(tmp_path: Path) -> None:
    path, size = tmp_path / "f", 1 << 20
    with path.open("w+b") as file:
        file.write(b"x" * size)
        file.flush()
        held = mmap.mmap(file.fileno(), size)
    path.unlink()
    gc.collect()  # else this process may give up a file of another test which the child keeps
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        assert deleted_bytes([child]) == 0, "what this process holds it has given"
        held.close()
        assert deleted_bytes([child]) == size
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert deleted_bytes([child]) == 0
