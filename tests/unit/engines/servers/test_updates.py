"""A weight update that is broken off in the middle of its wave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.updates import update_wave
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights


class Replica:
    """Notes what becomes of it."""

    client: Any = None

    def __init__(self) -> None:
        self.is_updating = False
        self.reasons: list[str] = []

    def hold(self) -> None: ...

    async def pause(self) -> None: ...

    def set_updating(self, is_updating: bool) -> None:
        self.is_updating = is_updating

    def fail(self, reason: str) -> None:
        self.reasons.append(reason)


class SlowWeights(VersionWeights):
    """Weights whose load waits, and then raises what it is given."""

    version = 3

    def __init__(self) -> None:
        self.is_loading = asyncio.Event()
        self.error: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def load(self, servers: Any, times: UpdateTimes) -> Any:
        self.is_loading.set()
        await self.error


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_all_servers_of_the_wave_are_given_up(is_cancelled: bool) -> None:
    wave: Any = [Replica(), Replica()]
    weights = SlowWeights()
    update = asyncio.create_task(
        update_wave(wave, weights, UpdateTimes(), RolloutConfig(path="model"), stays_paused=False)
    )
    await weights.is_loading.wait()
    assert all(replica.is_updating for replica in wave)
    if is_cancelled:
        update.cancel()
    else:
        weights.error.set_exception(RuntimeError("a defect"))
    with pytest.raises(asyncio.CancelledError if is_cancelled else RuntimeError):
        await update
    for replica in wave:
        assert replica.reasons == ["its weight update to version 3 was broken off"]
        assert not replica.is_updating
