from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_sc.transport.arena.free_extents import BLOCK_ALIGNMENT, FreeExtents, block_span

SIZE = 64


def test_blocks_are_whole_pages_and_never_empty() -> None:
    sizes = [0, 1, BLOCK_ALIGNMENT, BLOCK_ALIGNMENT + 1]
    assert [block_span(n) // BLOCK_ALIGNMENT for n in sizes] == [1, 1, 1, 2]


def test_the_first_part_that_fits_is_taken() -> None:
    free = FreeExtents(SIZE)
    assert [free.take(n) for n in (8, 4, 8)] == [0, 8, 12]
    free.give(0, 8)
    free.give(12, 8)
    assert free.extents() == [(0, 8), (12, 52)]
    assert free.take(9) == 12
    assert free.take(8) == 0
    assert free.take(SIZE) is None


@given(st.lists(st.tuples(st.booleans(), st.integers(0, SIZE), st.integers(1, 20)), max_size=60))
def test_it_says_what_a_bitmap_says(actions: list[tuple[bool, int, int]]) -> None:
    """Takes (first fit, and at a place) and gives, in any order, against one bool per byte."""
    free = FreeExtents(SIZE)
    is_taken = [False] * SIZE
    blocks: list[tuple[int, int]] = []
    for gives, place, size in actions:
        if gives and blocks:
            start, length = blocks.pop(place % len(blocks))
            free.give(start, length)
            is_taken[start : start + length] = [False] * length
            continue
        if place % 2:
            fits = [a for a in range(SIZE - size + 1) if not any(is_taken[a : a + size])]
            start = free.take(size)
            assert start == (fits[0] if fits else None)
        else:
            can_take = place + size <= SIZE and not any(is_taken[place : place + size])
            assert free.take_at(place, size) == can_take
            start = place if can_take else None
        if start is not None:
            is_taken[start : start + size] = [True] * size
            blocks.append((start, size))
        assert free.is_whole == (not blocks)
        covered = [False] * SIZE
        for first, length in free.extents():
            # neighbours are joined: what follows a free part is taken
            assert first + length == SIZE or is_taken[first + length]
            covered[first : first + length] = [True] * length
        assert covered == [not taken for taken in is_taken]
    for start, length in blocks:
        free.give(start, length)
    assert free.extents() == [(0, SIZE)]
