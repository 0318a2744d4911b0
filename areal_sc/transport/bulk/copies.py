"""Copies out of memory that this process can read: its own store, or another worker's arena."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Final

import numpy as np

THREAD_COPY_BYTES: Final = 32 << 20
"""Copies of more bytes run in threads; fewer the caches hold, and the event loop can wait for."""

NUM_COPY_THREADS: Final = 4
"""What another core has just written one core reads at half the speed that memory has."""

CHUNK_BYTES: Final = 4 << 20
"""What a thread copies before it takes the next piece."""

NUMPY_COPY_BYTES: Final = 256 << 10
"""From here on a copy is made without the GIL; that costs a microsecond, for the arrays."""

Copy = tuple[memoryview, memoryview]
"""Source and destination, of one size."""


async def run_copies(copies: list[Copy]) -> None:
    """Makes the copies, and forgets each when it is made: its source may be the last view of it.

    Cancelled, it leaves them to their threads, which keep all they need.

    Raises: ValueError: a destination has another size than its source.
    """
    num_bytes = sum(len(source) for source, _ in copies)
    if num_bytes <= THREAD_COPY_BYTES:
        _copy_all(copies)
        return
    is_of_large = num_bytes >= len(copies) * NUMPY_COPY_BYTES  # small ones wait for the GIL
    num_threads = NUM_COPY_THREADS if is_of_large else 1
    copies[:] = _chunks(copies)
    await asyncio.gather(*(asyncio.to_thread(_copy_all, copies) for _ in range(num_threads)))


def _chunks(copies: Iterable[Copy]) -> list[Copy]:
    return [
        (source[start : start + CHUNK_BYTES], destination[start : start + CHUNK_BYTES])
        for source, destination in copies
        for start in range(0, max(len(source), len(destination)), CHUNK_BYTES)
    ]


def _copy_all(copies: list[Copy]) -> None:
    """Several threads may share the list."""
    while True:
        try:
            source, destination = copies.pop()
        except IndexError:
            return
        if len(source) < NUMPY_COPY_BYTES:
            destination[:] = source
        else:
            np.frombuffer(destination, np.uint8)[:] = np.frombuffer(source, np.uint8)
