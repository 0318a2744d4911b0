"""A disk in memory, for controllers that run in virtual time."""

from __future__ import annotations

import asyncio
import errno
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from simulation.behavior import Number

from areal_sc.system.disk import Disk

T = TypeVar("T")


class SimulatedDisk(Disk):
    """Files in memory, and what a crash would leave of them.

    Attributes:
        latency_s: of each work.
        files: their content, as every process sees it.
        durable: the same, as far as it was brought to the disk; after a crash it is all that is
            certain to be there.
        before: is called before each change with its name (`write`, `sync`, ...) and the file;
            what it raises is the disk's failure.
        num_syncs: so many times a file was synced.
        room_bytes: that are left on it; None: without end.
        is_broken: syncs fail.
        num_failures: of writes and syncs, for these two reasons.
    """

    def __init__(self, latency_s: Number = 0.002, seed: int = 0) -> None:
        self.latency_s = latency_s
        self.files: dict[Path, bytes] = {}
        self.durable: dict[Path, bytes] = {}
        self.before: Callable[[str, Path], None] = lambda change, path: None
        self.max_write_bytes = 1 << 30
        self.num_syncs = 0
        self.room_bytes: int | None = None
        self.is_broken = False
        self.num_failures = 0
        self._rng = random.Random(seed)

    async def run(self, work: Callable[[], T]) -> T:
        latency_s = self.latency_s
        await asyncio.sleep(latency_s(self._rng) if callable(latency_s) else latency_s)
        return work()

    def names(self, folder: Path) -> list[str]:
        return [path.name for path in self.files if path.parent == folder]

    def read(self, path: Path) -> bytes:
        return self.files[path]

    def create(self, path: Path, content: bytes) -> None:
        self.before("create", path)
        if self.take_room(len(content)) < len(content):
            self.fail(errno.ENOSPC)
        self.check_sync()
        self.files[path] = self.durable[path] = content

    def crash(self) -> None:
        """Whoever wrote has died: of what was not synced, some part is there."""
        for path, content in self.files.items():
            num_synced = len(self.durable[path])
            num_bytes = self._rng.randint(num_synced, len(content))
            self.files[path] = content[:num_bytes]

    def repair(self) -> None:
        """Somebody has made room, or has chosen another disk."""
        self.room_bytes, self.is_broken = None, False

    def take_room(self, num_bytes: int) -> int:
        """So many of these bytes find room."""
        if self.room_bytes is None:
            return num_bytes
        taken = min(num_bytes, self.room_bytes)
        self.room_bytes -= taken
        return taken

    def check_sync(self) -> None:
        if self.is_broken:
            self.fail(errno.EIO)

    def fail(self, number: int) -> None:
        self.num_failures += 1
        raise OSError(number, os.strerror(number))

    def append_to(self, path: Path) -> SimulatedFile:
        return SimulatedFile(self, path)

    def cut(self, path: Path, num_bytes: int) -> None:
        self.before("cut", path)
        self.files[path] = self.durable[path] = self.files[path][:num_bytes]

    def remove(self, path: Path) -> None:
        self.before("remove", path)
        del self.files[path], self.durable[path]


class SimulatedFile:
    """A file of a simulated disk that grows."""

    def __init__(self, disk: SimulatedDisk, path: Path) -> None:
        self._disk = disk
        self._path = path

    def write(self, content: memoryview) -> int:
        self._disk.before("write", self._path)
        wanted = min(len(content), self._disk.max_write_bytes)
        taken = content[: self._disk.take_room(wanted)]
        if wanted and not taken:
            self._disk.fail(errno.ENOSPC)
        self._disk.files[self._path] += bytes(taken)
        return len(taken)

    def sync(self) -> None:
        self._disk.before("sync", self._path)
        self._disk.check_sync()
        self._disk.durable[self._path] = self._disk.files[self._path]
        self._disk.num_syncs += 1

    def close(self) -> None:
        """Nothing is left to close."""
