"""What a cluster sends to an agent is told to its script."""

from __future__ import annotations

import asyncio
import signal

from areal_sc.nodes.script_heard import Wishes
from areal_sc.nodes.spec import Wish
from areal_sc.system.process import SNAPSHOT_SIGNALS

LIMIT_S = 60.0


async def test_each_warning_that_time_is_over_asks_for_a_snapshot() -> None:
    def end() -> None:
        raise AssertionError("it is not asked to end")

    heard = asyncio.Event()
    wishes = Wishes(heard.set)
    wishes.take_signals(lambda: True, end)
    for number in SNAPSHOT_SIGNALS:
        heard.clear()
        signal.raise_signal(number)
        await asyncio.wait_for(heard.wait(), LIMIT_S)
    assert wishes.since(0) == [Wish.snapshot] * len(SNAPSHOT_SIGNALS)
    assert not wishes.are_of_end
