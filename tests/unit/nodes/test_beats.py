"""The thread that beats beside a worker's event loop."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from msgspec import msgpack
from waiting import until

from areal_sc.nodes import beats
from areal_sc.nodes.beats import Beats

LIMIT_S = 30.0
INTERVAL_S = 0.05


@asynccontextmanager
async def beating() -> AsyncIterator[socket.socket]:
    """What the agent reads."""
    agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.settimeout(LIMIT_S)
    beating = Beats(worker.fileno(), INTERVAL_S)
    try:
        yield agent
    finally:
        await beating.close()
        agent.close()
        worker.close()
        assert not any(thread.name == "beats" for thread in threading.enumerate())


def next_beat(agent: socket.socket) -> tuple[int, int]:
    """Beat and turn, as ages now; a blocking read."""
    beat_ns, turn_ns = msgpack.decode(agent.recv(1000), type=tuple[int, int])
    return beat_ns, turn_ns


async def test_a_worker_beats_and_its_event_loop_turns() -> None:
    async with beating() as agent:
        began_ns = time.monotonic_ns()
        give_up = time.monotonic() + LIMIT_S
        while True:
            beat_ns, turn_ns = await asyncio.to_thread(next_beat, agent)
            assert turn_ns <= beat_ns <= time.monotonic_ns()
            if turn_ns > began_ns:
                break
            assert time.monotonic() < give_up


async def test_a_blocked_event_loop_beats_on_and_is_seen_not_to_turn() -> None:
    async with beating() as agent:
        began_ns = time.monotonic_ns()
        beat_ns = turn_ns = 0
        while beat_ns < began_ns + 10 * INTERVAL_S * 1e9:  # blocks the loop, as a worker must not
            beat_ns, turn_ns = next_beat(agent)
            assert turn_ns < began_ns
        while turn_ns < began_ns:
            _, turn_ns = await asyncio.to_thread(next_beat, agent)


async def test_a_blocked_event_loop_is_said_to_be_and_where(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(beats, "BLOCKED_WARNING_S", 0.3)
    async with beating() as agent:
        give_up = time.monotonic() + LIMIT_S
        while not caplog.records:
            assert time.monotonic() < give_up
            next_beat(agent)
        for _ in range(10):
            next_beat(agent)
    (line,) = caplog.records
    assert "the event loop has not turned for" in line.getMessage()
    assert "test_a_blocked_event_loop_is_said_to_be_and_where" in line.getMessage()


async def test_an_agent_that_does_not_read_stops_nobody() -> None:
    agent, worker = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    worker.setblocking(False)
    with suppress(BlockingIOError):  # full
        while worker.send(b"x" * 100):
            pass
    beating = Beats(worker.fileno(), INTERVAL_S)
    await until_turned(beating, 3)
    agent.close()  # and now there is none any more
    await until_turned(beating, 3)
    await beating.close()
    worker.close()


async def until_turned(beating: Beats, times: int) -> None:
    """The thread goes on asking for turns."""
    turns = set[int]()
    await until(lambda: turns.add(beating._turn_ns) or len(turns) > times)
