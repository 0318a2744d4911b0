"""How many rollout workers update their weights at one time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from areal_sc.config.schema import (
    RolloutConfig,
    RolloutEngine,
    SchedulerConfig,
    SGLangConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.controller.background import Background
from areal_sc.controller.rollout_workers import RolloutWorkers
from areal_sc.engines.handles import make_generator
from areal_sc.weights import WeightsReference
from areal_sc.workers.calls import UPDATE_WEIGHTS

NUM_WORKERS = 6


class UpdatingFleet:
    """Workers whose updates end when the test says so."""

    config = SchedulerConfig(run_dir="unused")

    def __init__(self) -> None:
        self.updating: dict[str, asyncio.Future[None]] = {}
        self.updated: list[tuple[str, int]] = []

    async def call(
        self, member: Any, method: Any, weights: WeightsReference, *, timeout_s: float
    ) -> None:
        assert timeout_s > 600  # far above what any update takes
        assert method is UPDATE_WEIGHTS
        future = self.updating[member.name] = asyncio.get_running_loop().create_future()
        await future
        self.updated.append((member.name, weights.version))

    def finish(self, name: str) -> None:
        self.updating.pop(name).set_result(None)


def make_workers(**settings: Any) -> tuple[RolloutWorkers, UpdatingFleet]:
    config = RolloutConfig(
        num_workers=NUM_WORKERS,
        max_context_tokens=64,
        **{"sglang": SGLangConfig(), "weight_update": WeightUpdateConfig(), **settings},
    )
    fleet: Any = UpdatingFleet()
    background = Background(10.0, lambda: "")
    workers = RolloutWorkers(make_generator(config), fleet, background, lambda run: True)
    report = SimpleNamespace(node="node", store_room_bytes=0, incarnation="life")
    workers.track(
        SimpleNamespace(name=f"rollout/{i}", worker=report)  # type: ignore[misc]
        for i in range(NUM_WORKERS)
    )
    return workers, fleet


async def turn() -> None:
    """Lets everything that can go on do so."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("settings", "at_once"),
    [
        ({}, NUM_WORKERS),
        ({"max_unavailable": 1}, 1),
        ({"max_unavailable": 4}, 4),
        # of servers: three of each worker
        (
            {
                "engine": RolloutEngine.sglang,
                "sglang": SGLangConfig(num_servers=3),
                "max_unavailable": 6,
            },
            2,
        ),
        (
            {
                "engine": RolloutEngine.sglang,
                "sglang": SGLangConfig(num_servers=3),
                "max_unavailable": 2,
            },
            1,
        ),
    ],
)
async def test_as_many_at_once_as_may_stand_still(settings: dict[str, Any], at_once: int) -> None:
    workers, fleet = make_workers(**settings)
    workers.updates.receive(WeightsReference(1))
    num_left = NUM_WORKERS
    while num_left:
        await turn()
        assert len(fleet.updating) == min(at_once, num_left)
        fleet.finish(next(iter(fleet.updating)))
        num_left -= 1
    await workers.updates.wait_until_newest()
    assert sorted(fleet.updated) == [(f"rollout/{i}", 1) for i in range(NUM_WORKERS)]


async def test_whoever_waits_for_its_turn_gets_the_newest() -> None:
    workers, fleet = make_workers(max_unavailable=1)
    workers.updates.receive(WeightsReference(1))
    await turn()
    workers.updates.receive(WeightsReference(2))
    while fleet.updating:
        fleet.finish(next(iter(fleet.updating)))
        await turn()
    versions = [version for _, version in fleet.updated]
    assert versions == [1, *[2] * NUM_WORKERS]
    assert await workers.updates.hold() == 2


async def test_nobody_begins_while_updates_are_held() -> None:
    workers, fleet = make_workers(max_unavailable=2)
    assert await workers.updates.hold() == 0
    async with workers.updates.held_for_evaluation() as held:
        await held.worker()
        await turn()
    assert not fleet.updating
    workers.updates.receive(WeightsReference(1))
    await turn()
    assert len(fleet.updating) == 2
    await workers._background.close()


@pytest.mark.parametrize(
    ("method", "is_held"), [(WeightUpdateMethod.pull, True), (WeightUpdateMethod.collective, False)]
)
async def test_a_broadcast_needs_the_worker_that_evaluates(
    method: WeightUpdateMethod, is_held: bool
) -> None:
    workers, fleet = make_workers(weight_update=WeightUpdateConfig(method=method))
    async with workers.updates.held_for_evaluation() as held:
        state = await held.worker()
        workers.updates.receive(WeightsReference(1))
        await turn()
        assert (state.name not in fleet.updating) == is_held
    await turn()
    assert len(fleet.updating) == NUM_WORKERS
    await workers._background.close()
