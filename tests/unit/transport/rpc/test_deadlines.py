from __future__ import annotations

import asyncio

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
    assert len({int(due * TICKS_PER_S) for due in due_s}) < 20  # so few timers


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
