"""How much memory a process takes for a while beyond what it had, as the kernel counts it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path

_INTERVAL_S = 0.0005
_FIELDS = {"RssAnon": "private", "RssShmem": "shared"}


@dataclass
class MemoryGrowth:
    """Bytes: at most, during the block, over what was there before.

    Attributes:
        private: anonymous memory of the process.
        shared: shared memory that it has touched, also of a file in /dev/shm.
        both: of the two together; they need not peak at the same time.
    """

    private: int = 0
    shared: int = 0
    both: int = 0

    def include(self, other: MemoryGrowth) -> None:
        for field in fields(self):
            larger = max(getattr(self, field.name), getattr(other, field.name))
            setattr(self, field.name, larger)


@contextmanager
def watched_memory(pid: int, base: dict[str, int] | None = None) -> Iterator[MemoryGrowth]:
    """Samples a process from another one, every half millisecond.

    Args:
        base: an earlier `memory_of` that counts as what was there before; None: that of now.
    """
    growth = MemoryGrowth()
    before = base or memory_of(pid)
    stop = threading.Event()

    def sample() -> None:
        now = memory_of(pid)
        private, shared = (now[name] - before[name] for name in ("private", "shared"))
        growth.include(MemoryGrowth(private, shared, private + shared))

    watcher = threading.Thread(target=_repeat, args=(sample, stop))
    watcher.start()
    try:
        yield growth
    finally:
        sample()
        stop.set()
        watcher.join()


def memory_of(pid: int) -> dict[str, int]:
    """{"private", "shared"} resident bytes of a process now."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in _FIELDS:
            found[_FIELDS[name]] = int(value.split()[0]) * 1024
    return found


def _repeat(action: Callable[[], None], stop: threading.Event) -> None:
    while not stop.wait(_INTERVAL_S):
        action()
