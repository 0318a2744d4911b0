"""Copies that are shared among threads: every byte once, to its place."""

from __future__ import annotations

import asyncio
import itertools
import threading

import numpy as np
import pytest

from areal_sc.transport.bulk import copies
from areal_sc.transport.bulk.copies import THREAD_COPY_BYTES, Copy, run_copies


def copies_of(sizes: list[int]) -> tuple[np.ndarray, np.ndarray, list[Copy]]:
    """Random sources, destinations in reverse order, and the copies between them."""
    total = sum(sizes)
    source = np.random.default_rng(0).integers(0, 256, total, dtype=np.uint8)
    destination = np.zeros(total, np.uint8)
    found, position = [], 0
    for size in sizes:
        place = destination.data[total - position - size : total - position]
        found.append((source.data[position : position + size].toreadonly(), place))
        position += size
    return source, destination, found


def arrived(source: np.ndarray, destination: np.ndarray, sizes: list[int]) -> bool:
    ends = np.cumsum([0, *sizes])
    total = len(source)
    return all(
        np.array_equal(source[start:end], destination[total - end : total - start])
        for start, end in itertools.pairwise(ends)
    )


@pytest.mark.parametrize("num_bytes", [THREAD_COPY_BYTES, THREAD_COPY_BYTES + 1])
async def test_large_copies_run_beside_the_event_loop(
    num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threads_of_copies(monkeypatch)
    sizes = [num_bytes - (9 << 20) - 5, 5, 0, 9 << 20]
    source, destination, found = copies_of(sizes)
    await asyncio.wait_for(run_copies(found), 60)
    assert arrived(source, destination, sizes)
    is_large = num_bytes > THREAD_COPY_BYTES
    assert len(threads) == (copies.NUM_COPY_THREADS if is_large else 1)
    assert (threading.main_thread() in threads) == (not is_large)


async def test_many_small_copies_share_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They hold the GIL: several threads would wait for each other."""
    threads = threads_of_copies(monkeypatch)
    sizes = [64 << 10] * (THREAD_COPY_BYTES >> 16) + [1]
    source, destination, found = copies_of(sizes)
    await asyncio.wait_for(run_copies(found), 60)
    assert arrived(source, destination, sizes)
    assert len(threads) == 1
    assert threading.main_thread() not in threads


def threads_of_copies(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """Each call's that makes copies, from now on."""
    threads: list[threading.Thread] = []

    def copy_all(shared: list[Copy]) -> None:
        threads.append(threading.current_thread())
        plain(shared)

    plain = copies._copy_all
    monkeypatch.setattr(copies, "_copy_all", copy_all)
    return threads


@pytest.mark.parametrize("place_bytes", [THREAD_COPY_BYTES, THREAD_COPY_BYTES + 2])
async def test_a_place_of_another_size_is_refused(place_bytes: int) -> None:
    source = np.zeros(THREAD_COPY_BYTES + 1, np.uint8).data
    place = np.zeros(place_bytes, np.uint8).data
    with pytest.raises(ValueError, match=r"broadcast|different structures"):
        await asyncio.wait_for(run_copies([(source, place)]), 60)
