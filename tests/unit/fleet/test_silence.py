"""A worker whose event loop turns is not called blocked, however seldom it beats."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import SchedulerConfig
from areal_sc.fleet.node_workers import note_turn
from areal_sc.nodes.beats import BLOCKED_WARNING_S
from areal_sc.nodes.spec import Beat


@pytest.mark.parametrize("interval_s", [0.5, 2.0, 10.0, 30.0, 90.0])
def test_the_turn_that_a_beat_tells_of_was_asked_for_by_the_one_before(interval_s: float) -> None:
    config = SchedulerConfig(heartbeat_interval_s=interval_s)
    member: Any = SimpleNamespace(name="rollout/0", is_blocked=False)

    def told(turn_age_s: float) -> str | None:
        return note_turn(member, Beat("rollout/0", "1", 0.0, turn_age_s), config)

    assert told(interval_s + 0.1) is None
    assert not member.is_blocked
    assert told(interval_s + BLOCKED_WARNING_S + 0.1) is None
    assert member.is_blocked
    assert told(interval_s + 0.1) is None
    assert not member.is_blocked
    assert told(interval_s + config.hung_after_s - 0.1) is None
    assert "hangs" in str(told(interval_s + config.hung_after_s + 0.1))
