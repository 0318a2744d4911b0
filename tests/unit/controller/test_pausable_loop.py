"""The controllers' clock, with a machine's clock that the test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from areal_sc.controller.control_loop import MAX_GAP_S, PausableLoop


class Clock:
    """Moves by `tick_s` at each look, and by what a test adds."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = 1000.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def run(scenario: Callable[[PausableLoop, Clock], object], tick_s: float = 0.0) -> None:
    clock = Clock(tick_s)
    with asyncio.Runner(loop_factory=lambda: PausableLoop(clock)) as runner:

        async def main() -> None:
            loop = asyncio.get_running_loop()
            assert isinstance(loop, PausableLoop)
            outcome = scenario(loop, clock)
            if asyncio.iscoroutine(outcome):
                await outcome

        runner.run(main())


def test_the_clock_goes_on_while_the_loop_turns() -> None:
    def scenario(loop: PausableLoop, clock: Clock) -> None:
        began_s = loop.time()
        for _ in range(100):
            clock.now_s += MAX_GAP_S
            loop.time()
        assert loop.time() - began_s == pytest.approx(100 * MAX_GAP_S)

    run(scenario)


def test_a_pause_counts_no_more_than_one_gap() -> None:
    def scenario(loop: PausableLoop, clock: Clock) -> None:
        began_s = loop.time()
        clock.now_s += 3600.0
        assert loop.time() - began_s == pytest.approx(MAX_GAP_S)
        clock.now_s += 0.1
        assert loop.time() - began_s == pytest.approx(MAX_GAP_S + 0.1)

    run(scenario)


def test_a_wait_does_not_expire_by_a_pause() -> None:
    """Whether the loop is in a turn at that time, or between two."""

    async def scenario(loop: PausableLoop, clock: Clock) -> None:
        reply: asyncio.Future[str] = loop.create_future()

        def pause() -> None:
            clock.now_s += 3600.0
            loop.call_later(0.5, reply.set_result, "here")

        loop.call_later(0.5, pause)
        async with asyncio.timeout(2.0):
            assert await reply == "here"
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.0):
                await loop.create_future()

    run(scenario, tick_s=0.2)


def test_an_idle_loop_keeps_looking_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long sleep would look like a pause."""

    async def scenario(loop: PausableLoop, clock: Clock) -> None:
        looks: list[float] = []

        def look() -> float:
            looks.append(clock.now_s)
            clock.now_s += 0.02
            return clock.now_s

        monkeypatch.setattr(loop, "_clock", look)
        began_s = loop.time()
        await asyncio.sleep(3 * MAX_GAP_S)
        assert loop.time() - began_s == pytest.approx(clock.now_s - looks[0] - 0.02)
        assert len(looks) > 3

    run(scenario)
