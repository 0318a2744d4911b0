"""Which bytes of a segment are free: first fit, and neighbours join when they are given back."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

BLOCK_ALIGNMENT: Final = 4096
"""A page: locks, holes and the kernel's own book-keeping have no finer grain."""


def block_span(num_bytes: int) -> int:
    """Bytes of the block that a shard of `num_bytes` lies in; never 0, so it can be locked."""
    return max(1, -(-num_bytes // BLOCK_ALIGNMENT)) * BLOCK_ALIGNMENT


class FreeExtents:
    """The free parts of `num_bytes` bytes; all of them at first. Not safe across threads."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._starts = [0]
        self._stops = [num_bytes]

    @property
    def is_whole(self) -> bool:
        """Nothing is taken."""
        return self._starts == [0] and self._stops == [self.num_bytes]

    def extents(self) -> list[tuple[int, int]]:
        """(start, size) of every free part, ascending; no two of them touch."""
        return [(a, b - a) for a, b in zip(self._starts, self._stops, strict=True)]

    def take(self, size: int) -> int | None:
        """Takes the first part that is large enough; returns its start, or None."""
        for start, stop in zip(self._starts, self._stops, strict=True):
            if stop - start >= size:
                self.take_at(start, size)
                return start
        return None

    def take_at(self, start: int, size: int) -> bool:
        """Takes these very bytes, unless some of them are taken or do not exist."""
        index = bisect_left(self._stops, start + 1)
        if size <= 0 or index == len(self._starts) or self._starts[index] > start:
            return False
        free_from, free_to = self._starts[index], self._stops[index]
        if start + size > free_to:
            return False
        left = [(free_from, start), (start + size, free_to)]
        kept = [(a, b) for a, b in left if a < b]
        self._starts[index : index + 1] = [a for a, _ in kept]
        self._stops[index : index + 1] = [b for _, b in kept]
        return True

    def give(self, start: int, size: int) -> None:
        """Gives back bytes that were taken."""
        stop = start + size
        index = bisect_left(self._starts, start)
        assert 0 <= start < stop <= self.num_bytes
        assert index == 0 or self._stops[index - 1] <= start
        assert index == len(self._starts) or stop <= self._starts[index]
        first, last = index, index
        if index > 0 and self._stops[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == stop:
            last, stop = index + 1, self._stops[index]
        self._starts[first:last] = [start]
        self._stops[first:last] = [stop]
