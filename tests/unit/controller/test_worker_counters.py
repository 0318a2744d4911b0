"""Counters of a worker that was started again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from unittest.mock import Mock

import pytest

from areal_sc.controller.base import Controller
from areal_sc.controller.role_status import WorkerCounters
from areal_sc.transport.plane_stats import PlaneStats
from areal_sc.workers.calls import WorkerStats


def test_counts_of_all_lives_are_added_and_what_a_dead_one_had_is_not() -> None:
    counters = WorkerCounters()
    counters.add("a", {"generated_tokens": 5, "store_bytes": 100})
    counters.add("a", {"generated_tokens": 7, "store_bytes": 120})
    assert counters.total(is_alive=True) == {"generated_tokens": 7, "store_bytes": 120}
    assert counters.total(is_alive=False) == {"generated_tokens": 7}
    counters.add("b", {"generated_tokens": 1, "store_bytes": 10})
    counters.add("c", {"generated_tokens": 2, "store_bytes": 0})
    assert counters.total(is_alive=True) == {"generated_tokens": 10, "store_bytes": 0}


def test_a_warning_of_several_workers_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    texts = (("rows are padded",), ("rows are padded", "slow disk"), ("rows are padded",))
    stats = {}
    for rank, its in enumerate(texts):
        member = Mock()
        member.name = f"train/{rank}"
        stats[member] = WorkerStats(PlaneStats(), warnings=its)

    async def call_living(*_: Any) -> dict[Any, WorkerStats]:
        return stats

    controller: Any = Mock(_counters={})
    controller.fleet.call_living = call_living
    with caplog.at_level(logging.WARNING):
        asyncio.run(Controller._count(controller, list(stats)))
    told = [record.getMessage() for record in caplog.records]
    assert told == ["train/0 and 2 others: rows are padded", "train/1: slow disk"]
