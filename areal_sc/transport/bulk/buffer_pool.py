"""Destination buffers that are used again: fresh memory costs a page fault every 4 KiB.

A buffer is free again when the last tensor on it is gone; nobody gives it back by hand.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_SMALL_BYTES: Final = 64 << 10
"""Smaller buffers come from malloc's own lists, which hold their pages already."""

Bytes = npt.NDArray[np.uint8]


class BufferPool:
    """Lends buffers; keeps those that came back, up to `max_idle_bytes`.

    Buffers have one of two sizes per power of two, so at most a third of one is unused.
    """

    def __init__(self, max_idle_bytes: int) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._idle: dict[int, list[Bytes]] = {}
        self._idle_bytes = 0
        # Finalizers run wherever the last reference is dropped, inside the collector too: they
        # only append here, which takes no lock that the interrupted code may hold.
        self._returned: deque[Bytes] = deque()
        self._returned_bytes = 0  # about: several threads may change it at once

    @property
    def idle_bytes(self) -> int:
        """Bytes of buffers that nobody uses."""
        self._collect()
        return self._idle_bytes

    def take(self, num_bytes: int) -> Bytes:
        """A [num_bytes] uint8 array of undefined content.

        Tensors made with `torch.frombuffer` keep it, and so its memory, from being lent again.
        """
        if num_bytes < _SMALL_BYTES:
            return np.empty(num_bytes, dtype=np.uint8)
        self._collect()
        size = _size_class(num_bytes)
        idle = self._idle.get(size)
        if idle:
            memory = idle.pop()
            self._idle_bytes -= size
        else:
            memory = np.empty(size, dtype=np.uint8)
        lent = memory[:num_bytes]
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def joined(self, parts: Sequence[memoryview]) -> memoryview:
        """The bytes of all parts; the only part itself is not copied."""
        if len(parts) == 1:
            return parts[0]
        memory = self.take(sum(map(len, parts))).data
        position = 0
        for part in parts:
            memory[position : position + len(part)] = part
            position += len(part)
        return memory

    def _give_back(self, memory: Bytes) -> None:
        if self._idle_bytes + self._returned_bytes + memory.nbytes <= self._max_idle_bytes:
            self._returned_bytes += memory.nbytes
            self._returned.append(memory)

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            if self._idle_bytes + memory.nbytes <= self._max_idle_bytes:
                self._idle.setdefault(memory.nbytes, []).append(memory)
                self._idle_bytes += memory.nbytes
        self._returned_bytes = 0


def _size_class(num_bytes: int) -> int:
    power: Any = 1 << (num_bytes - 1).bit_length()
    return int(power if num_bytes > power * 3 // 4 else power * 3 // 4)
