from __future__ import annotations

import asyncio

import pytest

from areal_sc.transport.rpc.deadlines import TICKS_PER_S, Deadlines


class Wait:
    def __init__(self) -> None:
        self.expired_s: list[float] = []

    def expire(self) -> None:
        self.expired_s.append(asyncio.get_running_loop().time())


async def test_a_wait_expires_once_after_its_time_and_less_than_a_tick_late() -> None:
    loop = asyncio.get_running_loop()
    deadlines = Deadlines()
    waits = [Wait() for _ in range(100)]
    due_s = []
    for i, wait in enumerate(waits):
        due_s.append(loop.time() + i * 0.003)
        deadlines.within(i * 0.003).add(wait)
    async with asyncio.timeout(20):
        while not waits[-1].expired_s:  # noqa: ASYNC110 - the wait is what is tested
            await asyncio.sleep(0.01)
    for wait, due in zip(waits, due_s, strict=True):
        assert len(wait.expired_s) == 1
        assert wait.expired_s[0] >= due
    far_apart = [wait.expired_s[0] for wait in waits[::34]]  # more than a tick
    assert far_apart == sorted(far_apart)


@pytest.mark.parametrize("timeout_s", [0.01, 1.0, 6.5, 60.0, 3720.0, 100_000.0])
async def test_long_waits_share_few_timers_and_are_hardly_late(
    timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    now = 1000.0
    due: list[float] = []
    monkeypatch.setattr(loop, "time", lambda: now)
    monkeypatch.setattr(loop, "call_at", lambda when, *_: due.append(when))
    deadlines = Deadlines()
    for _ in range(1000):  # over as long as one wait may last
        num_timers = len(due)
        deadlines.within(timeout_s)
        now += timeout_s / 1000
        if len(due) > num_timers:
            late = due[-1] - (now - timeout_s / 1000 + timeout_s)
            assert 0 <= late <= max(1 / TICKS_PER_S, timeout_s / 64)
    assert len(due) <= 131  # twice 64, and what lies across the ends


async def test_a_wait_that_ended_does_not_expire() -> None:
    deadlines = Deadlines()
    ended, other = Wait(), Wait()
    together = deadlines.within(0.01)
    together |= {ended, other}
    together.discard(ended)
    async with asyncio.timeout(20):
        while not other.expired_s:  # noqa: ASYNC110 - the wait is what is tested
            await asyncio.sleep(0.01)
    assert ended.expired_s == []


async def test_a_wait_may_end_others_as_it_expires() -> None:
    deadlines = Deadlines()
    together = deadlines.within(0.01)

    class Greedy(Wait):
        def expire(self) -> None:
            super().expire()
            together.clear()

    greedy = [Greedy() for _ in range(3)]
    together |= set(greedy)
    async with asyncio.timeout(20):
        while not any(wait.expired_s for wait in greedy):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
