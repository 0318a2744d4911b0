from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from areal_sc.errors import PeerLost
from areal_sc.transport.rpc.outbox import MAX_WAITING_BYTES, Outbox
from areal_sc.transport.sockets.zmq_socket import Buffer


class Queues:
    """A socket whose callers have room for so many replies; -1 for a caller that has left."""

    def __init__(self, **room: int) -> None:
        self.room = {name.encode(): count for name, count in room.items()}
        self.sent: list[tuple[bytes, bytes]] = []
        self.num_attempts = 0

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        caller, reply = map(bytes, frames)
        self.num_attempts += 1
        if self.room[caller] < 0:
            raise PeerLost("the peer has disconnected")
        if self.room[caller] == 0:
            return False
        self.room[caller] -= 1
        self.sent.append((caller, reply))
        return True


def outbox_of(queues: Queues, timeout_s: float = 60.0) -> Outbox:
    return Outbox(queues, node_id="train/2", timeout_s=timeout_s)  # type: ignore[arg-type]


async def until_settled(outbox: Outbox) -> None:
    async with asyncio.timeout(60):
        while outbox._backlogs or outbox._retry:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.005)


async def test_replies_to_one_caller_stay_in_order_and_others_do_not_wait() -> None:
    queues = Queues(slow=2, quick=100)
    outbox = outbox_of(queues)
    for i in range(10):
        outbox.send(b"slow", b"%d" % i)
        outbox.send(b"quick", b"%d" % i)
    assert [reply for caller, reply in queues.sent if caller == b"quick"] == [
        b"%d" % i for i in range(10)
    ]
    queues.room[b"slow"] = 3  # it reads again, and the next reply must not overtake
    outbox.send(b"slow", b"10")
    queues.room[b"slow"] = 100
    await until_settled(outbox)
    assert [reply for caller, reply in queues.sent if caller == b"slow"] == [
        b"%d" % i for i in range(11)
    ]
    assert outbox.dropped.num == 0


async def test_who_reads_nothing_loses_all_that_waits_and_is_tried_no_more() -> None:
    queues = Queues(stopped=1)
    outbox = outbox_of(queues, timeout_s=0.05)
    for i in range(10):
        outbox.send(b"stopped", b"%d" % i)
    await until_settled(outbox)
    assert outbox.dropped.num == 9
    num_attempts = queues.num_attempts
    await asyncio.sleep(0.05)
    assert queues.num_attempts == num_attempts


async def test_who_reads_slowly_keeps_its_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, passed_s = asyncio.get_running_loop(), 0.0
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + passed_s)
    queues = Queues(slow=0)
    outbox = outbox_of(queues, timeout_s=1000.0)
    for i in range(10):
        outbox.send(b"slow", b"%d" % i)
    for number in range(1, 11):  # far longer in all than one caller may read nothing
        passed_s += 700
        queues.room[b"slow"] += 1
        while len(queues.sent) < number:  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.001)
    await until_settled(outbox)
    assert len(queues.sent) == 10
    assert outbox.dropped.num == 0


async def test_what_waits_for_one_caller_is_bounded_in_bytes() -> None:
    queues = Queues(stopped=0)
    outbox = outbox_of(queues)
    reply = bytes(1 << 20)
    for _ in range(200):
        outbox.send(b"stopped", reply)
    waiting = outbox._backlogs[b"stopped"].replies
    assert MAX_WAITING_BYTES - (2 << 20) < sum(map(len, waiting)) <= MAX_WAITING_BYTES
    assert outbox.dropped.num == 200 - len(waiting)
    outbox.close()
    assert outbox.dropped.num == 200


async def test_as_many_small_replies_may_wait_as_requests_may_run() -> None:
    queues = Queues(slow=1000)
    outbox = outbox_of(queues)
    for _ in range(16_384):
        outbox.send(b"slow", bytes(1000))
    queues.room[b"slow"] = 16_384
    await until_settled(outbox)
    assert outbox.dropped.num == 0


async def test_who_has_left_is_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    queues = Queues(left=-1)
    outbox = outbox_of(queues)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            outbox.send(b"left", b"reply")
    assert outbox.dropped.num == 100
    assert outbox._retry is None
    assert caplog.text.count("replies_dropped node=train/2") == 1
