"""Weights that are not to be had any more, while servers start again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.servers import replicas as module
from areal_sc.engines.servers.replica import Replica, ReplicaSettings
from areal_sc.engines.servers.replicas import ReplicaSet
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import EngineFailed, ShardGone


@dataclass
class Weights:
    """Of a version whose trainer may have died."""

    version: int
    are_gone: bool = False

    @property
    def again(self) -> Weights:
        return self

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        if self.are_gone:
            raise ShardGone("shard 7 on train/0 is gone")
        yield


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model_folder: Path) -> Any:
    """Two servers, of which the first one has started again; the newest weights are gone."""

    async def start(self: Replica, **_: object) -> None:
        self.version = 0

    async def update(wave: Any, weights: Weights, *_: object, **__: object) -> dict[Any, Any]:
        wave[0].version = weights.version
        return {}

    monkeypatch.setattr(Replica, "bring_up", start)
    monkeypatch.setattr(module, "update_wave", update)
    monkeypatch.setattr(module, "_NEWER_WITHIN_S", 0.01)
    sglang = SGLangConfig(num_servers=2, max_restarts=1)
    config = RolloutConfig(path=str(tiny_model_folder), sglang=sglang)
    servers: Any = ReplicaSet(
        ReplicaSettings(SGLangEngine(config), tmp_path, "rollout-0", is_cuda=False)
    )
    servers.dispatcher.failure = None
    servers._weights = Weights(12, are_gone=True)
    return servers


async def test_without_a_server_that_serves_the_engine_fails(servers: Any) -> None:
    """Nothing would be generated that newer weights could be made of."""
    assert not await servers._bring_back(servers.replicas[0])
    assert isinstance(servers.dispatcher.failure, EngineFailed)
    assert "no server is left, and version 12 is not to be had" in str(servers.dispatcher.failure)


async def test_beside_one_that_serves_newer_weights_are_waited_for(servers: Any) -> None:
    servers.replicas[1].is_serving = True
    back = asyncio.create_task(servers._bring_back(servers.replicas[0]))
    await asyncio.sleep(0.1)
    assert not back.done()
    servers._weights = Weights(13)
    servers._changed.set()
    assert await back
    assert (servers.replicas[0].version, servers.dispatcher.failure) == (13, None)
