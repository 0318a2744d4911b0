"""Counters of a worker that was started again."""

from __future__ import annotations

from areal_sc.controller.worker_counters import WorkerCounters


def test_counts_of_all_lives_are_added_and_what_a_dead_one_had_is_not() -> None:
    counters = WorkerCounters()
    counters.add("a", {"generated_tokens": 5, "store_bytes": 100})
    counters.add("a", {"generated_tokens": 7, "store_bytes": 120})
    assert counters.total(is_alive=True) == {"generated_tokens": 7, "store_bytes": 120}
    assert counters.total(is_alive=False) == {"generated_tokens": 7}
    counters.add("b", {"generated_tokens": 1, "store_bytes": 10})
    counters.add("c", {"generated_tokens": 2, "store_bytes": 0})
    assert counters.total(is_alive=True) == {"generated_tokens": 10, "store_bytes": 0}
