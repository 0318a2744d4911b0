"""Groups are shared among the workers that hold their version, and those that are about to."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.controller.background import Background
from areal_sc.controller.rollout.worker_set import WorkerLoads, WorkerQueue


@pytest.fixture
def loads() -> WorkerLoads:
    """Three workers on one node."""
    return WorkerLoads(["node"] * 3, max_on_worker=100, max_on_node={"node": 300})


def test_the_first_worker_with_a_version_leaves_others_their_share(loads: WorkerLoads) -> None:
    loads.note_load(0, version=1, gets_newest=True, num_running=1, num_held=0)
    loads.note_load(1, version=0, gets_newest=True, num_running=4, num_held=0)
    loads.note_load(2, version=0, gets_newest=True, num_running=1, num_held=0)
    chosen = []
    for num_waiting in range(9, 0, -1):  # fifteen groups on three workers
        worker = loads.least_loaded(1, num_waiting)
        if worker is None:
            break
        loads.promise(worker, 1)
        chosen.append(worker)
    assert chosen == [0] * 4
    loads.note_load(2, version=1, gets_newest=True, num_running=1, num_held=0)
    assert loads.least_loaded(1, 5) == 2


@pytest.mark.parametrize("num_held", [0, 100])
def test_nobody_waits_for_a_worker_that_will_not_come(loads: WorkerLoads, num_held: int) -> None:
    loads.note_load(0, version=1, gets_newest=True, num_running=9, num_held=0)
    # one is being evaluated on, say, or has no room for more groups
    for worker in (1, 2):
        loads.note_load(
            worker, version=0, gets_newest=num_held > 0, num_running=0, num_held=num_held
        )
    assert loads.least_loaded(1, 3) == 0


async def test_a_group_with_room_in_a_store_goes_there_whoever_waits_before_it() -> None:
    loads = WorkerLoads(["node"], max_on_worker=1, max_on_node={"node": 1})
    loads.note_load(0, version=1, num_running=0, num_held=1)  # what is left of the group
    background = Background(60.0, lambda: "")
    queue = WorkerQueue(loads, background)
    before = asyncio.create_task(queue.take_worker(0))
    await asyncio.sleep(0)
    assert await queue.take_worker(1, lambda: [0]) == 0
    assert (loads.promised, before.done()) == ({}, False), "its room was counted already"
    later = asyncio.create_task(queue.take_worker(2, lambda: [0]))
    loads.note_load(0, version=1, num_running=0, num_held=0)
    background.notify()
    assert await before == 0
    assert not later.done(), "home has an older version"
    later.cancel()
    await background.close()


def test_workers_that_update_one_after_the_other_get_as_many_groups() -> None:
    settings = Settings(
        num_rollout_workers=4,
        batch_groups=16,
        max_staleness=2,
        num_steps=12,
        behavior=Behavior(publication_s=lambda rng: rng.uniform(0.01, 0.1)),
    )
    run = run_virtual(TrainingRun(settings).play())
    num_groups = Counter(start.worker for start in run.cluster.starts)
    assert max(num_groups.values()) <= 1.5 * min(num_groups.values()), num_groups
