"""Destination buffers that are used again: fresh memory costs a page fault every 4 KiB.

A buffer is free again when the last tensor on it is gone; nobody gives it back by hand.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Final

import numpy as np
import numpy.typing as npt

_SMALL_BYTES: Final = 64 << 10
"""Smaller buffers come from malloc's own lists, which hold their pages already."""

Bytes = npt.NDArray[np.uint8]


class BufferPool:
    """Lends buffers; keeps about `max_idle_bytes` of those that came back.

    Buffers have one of two sizes per power of two, so at most a third of one is unused.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        # Finalizers run wherever the last reference is dropped, inside the collector too: a list
        # that never changes, of deques, needs no lock that the interrupted code may hold.
        self._idle = [(size, deque[Bytes]()) for k in range(15, 60) for size in (3 << k, 4 << k)]

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers that nobody uses."""
        return sum(size * len(idle) for size, idle in self._idle)

    def take_buffer(self, num_bytes: int) -> Bytes:
        """A [num_bytes] uint8 array of undefined content.

        Tensors made with `torch.frombuffer` keep it, and so its memory, from being lent again.
        """
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, dtype=np.uint8)
        size, idle = next(entry for entry in self._idle if entry[0] >= num_bytes)
        try:
            memory = idle.pop()
        except IndexError:
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._give_back, memory, idle).atexit = False
        return lent

    def _give_back(self, memory: Bytes, idle: deque[Bytes]) -> None:
        if self.idle_bytes + memory.nbytes <= self._max_idle_bytes:
            idle.append(memory)
