from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import WeightUpdateConfig
from areal_sc.errors import EngineFailed
from areal_sc.weights import rank_weights
from areal_sc.weights.methods import OpenWeightGroup, SentWeights
from areal_sc.weights.rank_weights import RankWeights


class Engine:
    """Has one bucket of weights."""

    is_cuda = False

    def gather_weights(self, bucket_bytes: int) -> list[str]:
        return ["bucket"]

    def weight_layouts(self, bucket_bytes: int) -> list[Any]:
        return []


class Broadcaster:
    """Sends to a group until it is closed or cancelled; then it fails."""

    def __init__(self, name: str, *_: Any) -> None:
        self.name = name
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.was_cancelled = self.is_closed = False

    def describe(self, world_size: int) -> str:
        return self.name

    def broadcast(self, bucket: str, cancelled: threading.Event) -> int:
        self.begun.set()
        assert self.may_end.wait(60)
        self.was_cancelled = cancelled.is_set()
        raise EngineFailed(f"a rank has left {self.name}")

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def broadcasts(monkeypatch: pytest.MonkeyPatch) -> RankWeights:
    monkeypatch.setattr(rank_weights, "WeightBroadcaster", Broadcaster)
    rank: Any = SimpleNamespace(
        engine=Engine(),
        handle=SimpleNamespace(config=SimpleNamespace(weight_update=WeightUpdateConfig())),
        compute=asyncio.to_thread,
        number=0,
        address="tcp://127.0.0.1:1",
        node="n",
    )
    return RankWeights(rank)


def wanted(name: str) -> OpenWeightGroup:
    return OpenWeightGroup(name, 2, False, ())


async def test_a_broadcast_to_an_earlier_group_does_not_end_the_one_that_is_open(
    broadcasts: RankWeights,
) -> None:
    await broadcasts.open_group(wanted("first"))
    first: Any = broadcasts._broadcaster
    sending = asyncio.create_task(broadcasts.broadcast(None))
    await asyncio.to_thread(first.begun.wait, 60)
    broadcasts.cancel_broadcast("first")
    await broadcasts.open_group(wanted("second"))
    second: Any = broadcasts._broadcaster
    first.may_end.set()
    assert await sending == SentWeights(0, "a rank has left first")
    assert first.is_closed
    assert first.was_cancelled, "another group was opened, and it is still cancelled"
    assert broadcasts._broadcaster is second
    assert not second.is_closed
    second.may_end.set()
    assert await broadcasts.broadcast(None) == SentWeights(0, "a rank has left second")
    assert not second.was_cancelled
    assert second.is_closed
    assert broadcasts._broadcaster is None
