"""How many rollout workers update their weights at one time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.lives import serving_life

from areal_sc.config.schema import (
    RolloutConfig,
    SchedulerConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.config.server_settings import ServersConfig
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.rollout_workers import RolloutWorkers
from areal_sc.controller.rollout.worker_set import NO_VERSION
from areal_sc.controller.shared_card import SharedCard
from areal_sc.engines.handles import make_generator
from areal_sc.fleet.worker_life import Tell
from areal_sc.weights.methods import ADOPT_WEIGHTS
from areal_sc.weights.published import WeightsReference

NUM_WORKERS = 6


class UpdatingFleet:
    """Workers whose updates end when the test says so."""

    config = SchedulerConfig(run_dir="unused")

    def __init__(self) -> None:
        self.tell: Tell = lambda event: None
        self.updating: dict[str, asyncio.Future[None]] = {}
        self.updated: list[tuple[str, int]] = []
        self.members: list[Any] = []

    async def call(
        self, member: Any, method: Any, weights: WeightsReference, *, timeout_s: float
    ) -> None:
        assert timeout_s > 600  # far above what any update takes
        assert method is ADOPT_WEIGHTS
        future = self.updating[member.name] = asyncio.get_running_loop().create_future()
        await future
        self.updated.append((member.name, weights.version))

    def finish(self, name: str) -> None:
        self.updating.pop(name).set_result(None)


def make_workers(**settings: Any) -> tuple[RolloutWorkers, UpdatingFleet]:
    given = {"num_workers": NUM_WORKERS, "servers": ServersConfig(), **settings}
    config = RolloutConfig(
        max_context_tokens=64, **{"weight_update": WeightUpdateConfig(), **given}
    )
    fleet: Any = UpdatingFleet()
    background = Background(10.0, lambda: "")
    workers = RolloutWorkers(
        make_generator(config),
        fleet,
        background,
        lambda run: True,
        turn,
        lambda event: None,
        SharedCard(),
    )
    report = SimpleNamespace(node="node", store_room_bytes=0, incarnation="life")
    facts = {"worker": report, "is_adopted": False, "has_lived": True}
    workers.track(
        [
            SimpleNamespace(name=f"rollout/{i}", index=i, life=serving_life(), **facts)  # type: ignore[misc]
            for i in range(config.num_workers)
        ]
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
    ],
)
async def test_as_many_at_once_as_may_stand_still(settings: dict[str, Any], at_once: int) -> None:
    workers, fleet = make_workers(**settings)
    workers.updates.adopt(WeightsReference(1))
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
    workers.updates.adopt(WeightsReference(1))
    await turn()
    workers.updates.adopt(WeightsReference(2))
    while fleet.updating:
        fleet.finish(next(iter(fleet.updating)))
        await turn()
    versions = [version for _, version in fleet.updated]
    assert versions == [1, *[2] * NUM_WORKERS]
    assert await workers.updates.hold() == 2


async def test_weights_of_a_lineage_that_was_left_are_of_no_use() -> None:
    """Also those that come late, and those of the same version."""
    workers, fleet = make_workers()
    updates = workers.updates
    updates.adopt(WeightsReference(7, lineage=1))
    await turn()
    *ended, late = list(fleet.updating)
    for name in ended:
        fleet.finish(name)
    await turn()
    assert {state.version for state in updates.states} == {0, 7}
    updates.forget()
    assert {state.version for state in updates.states} == {NO_VERSION}
    assert not updates.current_members, "nobody takes part in a broadcast, or in an evaluation"
    taken = asyncio.ensure_future(workers.set.take_worker(5))
    fleet.finish(late)
    await turn()
    assert not taken.done(), "it has got weights of the lineage that was left"
    updates.adopt(WeightsReference(7, lineage=2))
    await turn()
    assert len(fleet.updating) == NUM_WORKERS
    assert not taken.done()
    fleet.finish(late)
    await turn()
    assert (await taken).name == late
    for name in list(fleet.updating):
        fleet.finish(name)
    await updates.wait_until_newest()


async def test_a_late_update_goes_on_with_the_weights_of_the_new_lineage() -> None:
    workers, fleet = make_workers(num_workers=1)
    workers.updates.adopt(WeightsReference(7, lineage=1))
    await turn()
    (name,) = fleet.updating
    workers.updates.forget()
    workers.updates.adopt(WeightsReference(5, lineage=2))
    fleet.finish(name)
    await turn()
    assert workers.updates.states[0].version == NO_VERSION
    fleet.finish(name)
    await workers.updates.wait_until_newest()
    assert fleet.updated == [(name, 7), (name, 5)]


async def test_nobody_begins_while_updates_are_held() -> None:
    workers, fleet = make_workers(max_unavailable=2)
    assert await workers.updates.hold() == 0
    async with workers.updates.held_for_evaluation() as held:
        await held.worker()
        await turn()
    assert not fleet.updating
    workers.updates.adopt(WeightsReference(1))
    await turn()
    assert len(fleet.updating) == 2
    await workers.background.close()


@pytest.mark.parametrize(
    ("method", "is_held"), [(WeightUpdateMethod.pull, True), (WeightUpdateMethod.collective, False)]
)
async def test_a_broadcast_needs_the_worker_that_evaluates(
    method: WeightUpdateMethod, is_held: bool
) -> None:
    workers, fleet = make_workers(weight_update=WeightUpdateConfig(method=method))
    async with workers.updates.held_for_evaluation() as held:
        state = await held.worker()
        workers.updates.adopt(WeightsReference(1))
        await turn()
        assert (state.name not in fleet.updating) == is_held
    await turn()
    assert len(fleet.updating) == NUM_WORKERS
    await workers.background.close()
