"""The disk, as far as it is injected: a simulation puts one in its place that fails or is slow."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

from areal_sc.system.durable import own_file, write_atomic

T = TypeVar("T")


class AppendedFile(Protocol):
    """A file that grows. What was written stays after a crash only if `sync` returned."""

    def write(self, content: memoryview) -> int:
        """Number of bytes taken, from the first on; it may be fewer than all."""

    def sync(self) -> None: ...

    def close(self) -> None: ...


class Disk:
    """The real one. All methods but `run` block, and raise OSError.

    Args:
        may_change: raises what a change of the disk is to raise, before each.
    """

    def __init__(self, may_change: Callable[[], None] = lambda: None) -> None:
        self._may_change = may_change

    async def run(self, work: Callable[[], T]) -> T:
        """Result of work that blocks; the event loop goes on meanwhile."""
        return await asyncio.to_thread(work)

    def names(self, folder: Path) -> list[str]:
        """Names of the files in a folder; none if there is no folder."""
        return os.listdir(folder) if folder.exists() else []

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def create(self, path: Path, content: bytes) -> None:
        """The file, and its folder, are there afterwards; after a crash, whole or not at all."""
        self._may_change()
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, content)

    def append_to(self, path: Path) -> AppendedFile:
        return _DiskFile(path, self._may_change)

    def cut(self, path: Path, num_bytes: int) -> None:
        """The file keeps its first `num_bytes` bytes."""
        self._may_change()
        with path.open("r+b") as file:
            file.truncate(num_bytes)
            os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        self._may_change()
        path.unlink()


class _DiskFile:
    def __init__(self, path: Path, may_change: Callable[[], None]) -> None:
        self._may_change = may_change
        self._file = open(path, "ab", buffering=0, opener=own_file)  # noqa: SIM115

    def write(self, content: memoryview) -> int:
        self._may_change()
        return self._file.write(content)

    def sync(self) -> None:
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
