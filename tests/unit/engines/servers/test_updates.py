"""A weight update that is broken off in the middle of its wave."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.updates import update_wave
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights
from areal_sc.errors import EngineFailed, ModelError, PeerLost


class Replica:
    """Notes what becomes of it."""

    name = "server"

    def __init__(self, refusal: Exception | None = None) -> None:
        self.client: Any = refusal
        self.is_updating = False
        self.reasons: list[str] = []

    def hold(self) -> None: ...

    async def pause(self) -> None: ...

    async def wake(self) -> None: ...

    async def take_cache(self) -> None: ...

    async def finish_update(self, version: int) -> None: ...

    async def resume(self) -> None: ...

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


class RefusedWeights(VersionWeights):
    """A server takes them beside what it serves unless its client is an error."""

    version = 3

    async def load_beside(self, server: Any) -> None:
        if server:
            raise server

    async def load(self, servers: Any, times: UpdateTimes) -> Any:
        return {}


async def update(wave: Any) -> Any:
    config = RolloutConfig(path="model")
    return await update_wave(wave, RefusedWeights(), UpdateTimes(), config, stays_paused=False)


async def test_one_server_that_refuses_is_given_up_and_the_others_go_on() -> None:
    refusal = EngineFailed("out of memory")
    wave = [Replica(), Replica(refusal)]
    assert await update(wave) == {wave[1]: refusal}
    assert await update([Replica(PeerLost("gone"))])


async def test_weights_that_all_refuse_or_one_ignores_are_wrong() -> None:
    refusal, ignored = EngineFailed("rank 9 is too large"), ModelError("it computes without them")
    with pytest.raises(ModelError, match="no server takes version 3: rank 9"):
        await update([Replica(refusal), Replica(refusal)])
    with pytest.raises(ModelError, match="it computes without them"):
        await update([Replica(), Replica(ignored)])


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_all_servers_of_the_wave_are_given_up(is_cancelled: bool) -> None:
    wave: Any = [Replica(), Replica()]
    weights = SlowWeights()
    task = asyncio.create_task(
        update_wave(wave, weights, UpdateTimes(), RolloutConfig(path="model"), stays_paused=False)
    )
    await weights.is_loading.wait()
    assert all(replica.is_updating for replica in wave)
    if is_cancelled:
        task.cancel()
    else:
        weights.error.set_exception(RuntimeError("a defect"))
    with pytest.raises(asyncio.CancelledError if is_cancelled else RuntimeError):
        await task
    for replica in wave:
        assert replica.reasons == ["its weight update to version 3 was broken off"]
        assert not replica.is_updating
