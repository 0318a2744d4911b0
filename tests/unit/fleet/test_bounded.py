"""Bounded waits, in virtual time."""

from __future__ import annotations

import asyncio
import time

import pytest
from simulation.virtual_loop import in_virtual_time

from areal_sc.controller.control_loop import PausableLoop
from areal_sc.errors import WaitTimeout
from areal_sc.system.waiting import bounded


async def ends_after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@in_virtual_time
async def test_a_long_wait_is_told_and_a_wait_without_end_is_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert await bounded(ends_after(1.0), 100.0, "the disk", "some.limit_s") == "done"
    assert not caplog.records
    assert await bounded(ends_after(70.0), 100.0, "the disk", "some.limit_s") == "done"
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"waited for the disk for {s} s; some.limit_s ends it after 100 s" for s in (30, 60)
    ]
    endless = asyncio.ensure_future(ends_after(1000.0))
    with pytest.raises(WaitTimeout, match=r"for the disk for 100 s, which some\.limit_s allows"):
        await bounded(endless, 100.0, "the disk", "some.limit_s")
    await asyncio.sleep(0)
    assert endless.cancelled()


@in_virtual_time
async def test_what_the_work_raises_is_raised_and_a_cancelled_wait_cancels_it() -> None:
    async def fails() -> None:
        raise ValueError("from the work")

    with pytest.raises(ValueError, match="from the work"):
        await bounded(fails(), 100.0, "it", "some.limit_s")
    work = asyncio.ensure_future(ends_after(1000.0))
    waiting = asyncio.create_task(bounded(work, 2000.0, "it", "some.limit_s"))
    await asyncio.sleep(1.0)
    waiting.cancel()
    await asyncio.wait([waiting, work])
    assert work.cancelled()


def test_a_pause_of_the_script_counts_for_no_limit() -> None:
    paused_s = [0.0]

    async def pause() -> str:
        paused_s[0] = 5000.0
        await asyncio.sleep(0.5)
        return "done"

    with asyncio.Runner(
        loop_factory=lambda: PausableLoop(lambda: time.monotonic() + paused_s[0])
    ) as runner:
        assert runner.run(bounded(pause(), 1000.0, "it", "some.limit_s")) == "done"
