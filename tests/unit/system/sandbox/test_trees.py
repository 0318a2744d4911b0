"""What a program uses and leaves, counted."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

from areal_sc.system.sandbox.trees import deleted_bytes


def test_a_deleted_file_that_is_mapped_counts(tmp_path: Path) -> None:
    path, size = tmp_path / "f", 1 << 20
    before = deleted_bytes([os.getpid()])
    with path.open("w+b") as file:
        file.write(b"x" * size)
        file.flush()
        held = mmap.mmap(file.fileno(), size)
    path.unlink()
    assert deleted_bytes([os.getpid()]) >= before + size
    held.close()
    assert deleted_bytes([os.getpid()]) < before + size
