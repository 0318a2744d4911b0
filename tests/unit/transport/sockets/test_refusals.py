from __future__ import annotations

import logging
import time

import pytest

from areal_sc.transport.sockets.refusals import LOG_INTERVAL_S, Refusals


def test_a_flood_is_counted_and_logged_once_an_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    logger = logging.getLogger("areal_sc.test")
    refusals = Refusals(logger, "malformed_message", "train/2")
    for i in range(1000):
        refusals.add(ValueError(f"bad {i}"))
    now_s += LOG_INTERVAL_S - 0.1
    refusals.add("within the interval")
    now_s += 0.2
    refusals.add("later")
    assert refusals.num == 1002
    assert caplog.messages == [
        "malformed_message node=train/2 count=1 reason=bad 0",
        "malformed_message node=train/2 count=1002 reason=later",
    ]
