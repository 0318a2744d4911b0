"""Pulls that take turns at one owner."""

from __future__ import annotations

import asyncio

import numpy as np

from areal_sc.transport.bulk.request_queue import MAX_REQUEST_FIELDS, FetchJob, RequestQueue
from areal_sc.transport.pull_plan import Owner, Piece, Segment, SegmentCursor

OWNER = Owner("rollout/0", "tcp://10.0.0.1:5", "life1")
REQUEST_BYTES = 100


def job_of(name: str, sizes: list[int], num_fields: int = 1) -> FetchJob:
    """A pull of one row of so many bytes from each of its shards."""
    segments = []
    for number, size in enumerate(sizes):
        fields = {f"f{i}": "uint8" for i in range(num_fields)}
        piece = Piece(OWNER, f"{name}.{number}", fields, range(1), [size])
        places = [np.zeros(size, np.uint8).data for _ in fields]
        segments.append(Segment(piece, places))
    num_bytes = sum(sizes) * num_fields
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    cursor = SegmentCursor(segments, uncut_bytes=REQUEST_BYTES // 2)
    return FetchJob(f"{name}.0", cursor, num_bytes, done)


def asked(queue: RequestQueue) -> list[tuple[str, int]]:
    """(shard, bytes) of each part of the next request."""
    return [(part.segment.piece.shard_id, part.num_bytes) for _, part in queue.next_request()]


async def test_large_pulls_take_turns_and_small_ones_share_a_request() -> None:
    queue = RequestQueue(REQUEST_BYTES)
    queue.add(job_of("A", [250]))
    for name in "bc":
        queue.add(job_of(name, [10]))
    assert asked(queue) == [("A.0", 100)]
    assert asked(queue) == [("b.0", 10), ("c.0", 10), ("A.0", 80)]
    assert asked(queue) == [("A.0", 70)]
    assert not queue
    assert asked(queue) == []


async def test_what_is_put_back_is_asked_for_again_unless_nobody_waits() -> None:
    queue = RequestQueue(REQUEST_BYTES)
    waiting, failed = job_of("A", [40]), job_of("B", [40])
    queue.add(waiting)
    queue.add(failed)
    request = queue.next_request()
    failed.done.cancel()
    queue.put_back(request)
    assert asked(queue) == [("A.0", 40)]
    assert not queue


async def test_a_forgotten_pull_is_not_asked_for_any_more() -> None:
    queue = RequestQueue(REQUEST_BYTES)
    job = job_of("A", [250])
    queue.add(job)
    request = queue.next_request()
    queue.put_back(request)
    queue.forget(job)
    assert not queue
    assert asked(queue) == []


async def test_a_pull_that_failed_is_passed_over() -> None:
    queue = RequestQueue(REQUEST_BYTES)
    failed, waiting = job_of("A", [40]), job_of("B", [40])
    failed.done.cancel()
    queue.add(failed)
    queue.add(waiting)
    assert asked(queue) == [("B.0", 40)]


async def test_a_request_names_a_limited_number_of_fields() -> None:
    queue = RequestQueue(1 << 20)
    queue.add(job_of("A", [1, 1], num_fields=MAX_REQUEST_FIELDS - 1))
    named = [sum(len(part.fields) for _, part in queue.next_request()) for _ in range(3)]
    assert sum(named) == 2 * (MAX_REQUEST_FIELDS - 1)
    assert max(named) <= MAX_REQUEST_FIELDS


async def test_what_waits_can_be_taken_out() -> None:
    queue = RequestQueue(REQUEST_BYTES)
    jobs = [job_of("A", [40]), job_of("B", [40])]
    for job in jobs:
        queue.add(job)
    assert queue.drain() == jobs
    assert not queue
