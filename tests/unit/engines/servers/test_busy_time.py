from __future__ import annotations

import pytest

from areal_sc.engines.servers.places import BusyTime


def test_each_answer_is_counted_for_as_long_as_it_runs() -> None:
    times_s = iter((5.0, 10.0, 12.0, 14.0, 18.0, 30.0))
    busy = BusyTime(lambda: next(times_s))
    for num_running in (1, 2, 1, 0, 0):
        busy.note_running(num_running)
    assert busy.busy_s == 8.0
    assert busy.answer_s == pytest.approx(2 + 2 * 2 + 4)
