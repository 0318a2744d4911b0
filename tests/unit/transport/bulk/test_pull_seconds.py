"""Where the time of a pull went, and the line that tells of a slow one."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any, cast

import pytest

from areal_sc.transport.bulk.client import (
    SLOW_BYTES_PER_S,
    SLOW_PULL_S,
    BulkClient,
)
from areal_sc.transport.bulk.owner_connection import Fetch
from areal_sc.transport.bulk.session import ShardOwner

NUM_BYTES = 40_000_000
ALLOWED_S = SLOW_PULL_S + NUM_BYTES / SLOW_BYTES_PER_S


@pytest.mark.parametrize("has_excess", [False, True])
async def test_phases_are_all_of_the_time_and_slow_pulls_are_logged(
    has_excess: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    ended_s = 100 + ALLOWED_S + (0.5 if has_excess else -0.5)
    client = BulkClient(cast(Any, None), "train/0")
    owner = ShardOwner("rollout/3", "tcp://10.0.0.1:5", "life1")
    fetch = Fetch("life1.1", deque(), 0, loop.create_future(), 100.0, sent_s=102.0, copying_s=0.25)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(loop, "time", lambda: ended_s)
        client._count(fetch, owner, connecting_s=1.5, num_bytes=NUM_BYTES)
        client._count(fetch, owner, connecting_s=1.5, num_bytes=NUM_BYTES)
    wire_s = ended_s - 100 - 1.5 - 0.5 - 0.25
    assert list(client.seconds.values()) == [3.0, 1.0, 2 * wire_s, 0.5]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (2 if has_excess else 0)
    for line in lines:
        assert line.startswith(f"pull_slow owner=rollout/3 bytes={NUM_BYTES} missing_bytes=0 ")
        assert f"slowest=wire slowest_seconds={wire_s:.1f}" in line
