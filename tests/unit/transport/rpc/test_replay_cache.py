from __future__ import annotations

import sys

from hypothesis import given
from hypothesis import strategies as st

from areal_sc.transport.rpc.server import ReplayCache


def test_a_finished_request_is_found_again() -> None:
    cache = ReplayCache()
    cache.add("a", b"reply")
    assert cache["a"] == b"reply"
    assert "b" not in cache


def test_a_large_reply_is_forgotten_but_its_id_is_not() -> None:
    cache = ReplayCache(max_reply_bytes=10)
    cache.add("a", bytes(11))
    assert cache["a"] is None
    cache.add("b", bytes(10))
    assert cache["b"] == bytes(10)


@given(st.lists(st.integers(0, 4000), max_size=60), st.integers(1_000, 20_000))
def test_the_newest_are_kept_as_far_as_memory_allows(sizes: list[int], max_bytes: int) -> None:
    cache = ReplayCache(max_bytes=max_bytes, max_reply_bytes=2000)
    for i, size in enumerate(sizes):
        cache.add(f"request-{i}", bytes(size))
    kept = [i for i in range(len(sizes)) if f"request-{i}" in cache]
    held = {i: size if size <= 2000 else 0 for i, size in enumerate(sizes)}
    assert kept == list(range(len(sizes) - len(kept), len(sizes)))  # a suffix
    assert len(cache) == len(kept)
    assert cache.num_bytes <= max_bytes
    memory = sum(sys.getsizeof(f"request-{i}") + sys.getsizeof(cache[f"request-{i}"]) for i in kept)
    assert memory <= max_bytes
    if len(kept) < len(sizes):  # nothing was dropped without need
        newest_dropped = len(sizes) - len(kept) - 1
        needed = sum(held[i] for i in kept) + held[newest_dropped]
        assert needed + 400 * (len(kept) + 1) > max_bytes
