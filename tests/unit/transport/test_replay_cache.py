from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_sc.transport.replay_cache import ReplayCache


def test_a_finished_request_is_found_again() -> None:
    cache = ReplayCache()
    cache.add("a", "step", [b"head", b"tail"])
    found = cache.get("a")
    assert found is not None
    assert (found.method, found.reply) == ("step", [b"head", b"tail"])
    assert cache.get("b") is None


def test_a_large_reply_is_forgotten_but_its_id_is_not() -> None:
    cache = ReplayCache(max_reply_bytes=10)
    cache.add("a", "step", [bytes(11)])
    found = cache.get("a")
    assert found is not None
    assert found.reply is None
    assert cache.num_bytes == 0


@given(st.lists(st.integers(0, 30), max_size=60), st.integers(1, 10), st.integers(1, 100))
def test_the_newest_are_kept_within_both_limits(
    sizes: list[int], max_count: int, max_bytes: int
) -> None:
    cache = ReplayCache(max_count=max_count, max_bytes=max_bytes, max_reply_bytes=20)
    for i, size in enumerate(sizes):
        cache.add(str(i), "step", [bytes(size)])
    kept = [i for i in range(len(sizes)) if cache.get(str(i)) is not None]
    held = {i: size if size <= 20 else 0 for i, size in enumerate(sizes)}
    assert kept == list(range(len(sizes) - len(kept), len(sizes)))  # a suffix
    assert len(cache) == len(kept) <= max_count
    assert cache.num_bytes == sum(held[i] for i in kept) <= max_bytes
    if len(kept) < min(max_count, len(sizes)):  # nothing was dropped without need
        assert (
            sum(held[i] for i in kept) + held[kept[0] - 1 if kept else len(sizes) - 1] > max_bytes
        )
