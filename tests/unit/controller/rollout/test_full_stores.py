"""Stores without room: what waits for it goes on as soon as there is some."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.behavior import Behavior
from simulation.lives import serving_life
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual

from areal_sc.config.schema import AdmissionMode, OverBound, RolloutConfig, WeightUpdateConfig
from areal_sc.config.server_settings import ServersConfig
from areal_sc.controller.background import Background
from areal_sc.controller.rollout.worker_set import (
    StoreRoom,
    WorkerSet,
    check_room,
    store_room,
)
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.nodes.spec import WorkerReport
from areal_sc.sizing.store_room import max_group_bytes
from areal_sc.token_fields import NO_FIELDS, FieldBytes

PAGE_BYTES = 4096


@pytest.mark.parametrize("max_concurrent_groups", [1, 3, 64])
@pytest.mark.parametrize("mode", OverBound)
def test_prompts_that_come_again_wait_for_room_and_find_it(
    mode: OverBound, max_concurrent_groups: int
) -> None:
    """More of them than the stores hold, so that most wait until a batch is swept. Weights have
    arrived before that, so nothing else wakes them. They are too many to run at one time, too."""
    ahead = Settings(
        num_steps=8,
        over_bound=mode,
        max_staleness=3,
        admission=AdmissionMode.eager,
        num_rollout_workers=1,
    )

    async def first() -> dict[str, Any]:
        async with TrainingRun(ahead).started() as run:
            await run.step()
            return await run.save()

    saved = run_virtual(first())

    limits: dict[str, Any] = {
        "store_groups": ahead.batch_groups if max_concurrent_groups == 64 else 1000,
        "max_concurrent_groups": max_concurrent_groups,
    }

    async def second() -> TrainingRun:
        run = TrainingRun(replace(ahead, **limits))
        async with run.started():
            await run.load(saved)
            returned = run.rollout.groups.ledger.snapshot().returned_prompts
            assert len(returned) > 2 * ahead.batch_groups
            for _ in range(1, ahead.num_steps):
                await run.rollout.wait_for_weights_async()
                await run.step()
            await run.check_end()
        return run

    run = run_virtual(second())
    assert max(start.num_running for start in run.cluster.starts) < max_concurrent_groups
    assert [batch.global_step for batch in run.batches] == list(range(ahead.num_steps))


@in_virtual_time
async def test_groups_of_rollout_batch_that_leave_no_rows_leave_room() -> None:
    """One group fits; the others would wait for ever if the first told nobody that it is gone."""
    settings = Settings(
        batch_groups=1,
        store_groups=1,
        num_rollout_workers=1,
        behavior=Behavior(group_rejection=1.0),
    )
    async with TrainingRun(settings).started() as run:
        with pytest.raises(WorkflowError, match=r"all 6 groups were rejected"):
            await run.rollout.rollout_batch_async(run.prompts, run.workflow, 6)


def room_of(config: RolloutConfig, rooms: dict[str, list[int]]) -> StoreRoom:
    """`rooms` has what each worker reports, by node."""
    reports = [(node, free_bytes) for node, of_node in rooms.items() for free_bytes in of_node]
    room = store_room(
        [
            WorkerReport(f"rollout/{i}", "life", "", 1, node, free_bytes)
            for i, (node, free_bytes) in enumerate(reports)
        ],
        config,
    )
    check_room(room, config)
    return room


GROUP_PAGES = 2 * PAGE_BYTES
"""Of a group of two short episodes, each of which takes whole pages."""


def rollout_config(**changes: Any) -> RolloutConfig:
    return RolloutConfig(
        **{
            "num_workers": 2,
            "train_batch_groups": 4,
            "group_size": 2,
            "max_context_tokens": 64,
            "servers": ServersConfig(),
            "weight_update": WeightUpdateConfig(),
            **changes,
        }
    )


def test_free_memory_is_counted_in_pages() -> None:
    """What a worker reports is what its node has, so it is not added up."""
    config = rollout_config(max_context_tokens=56)
    assert max_group_bytes(config) < PAGE_BYTES
    room_of(config, {"a": [4 * GROUP_PAGES, 5 * GROUP_PAGES]})
    room_of(config, {"a": [2 * GROUP_PAGES], "b": [2 * GROUP_PAGES]})
    room_of(config, {"a": [0, 0]})  # not known
    with pytest.raises(ConfigError) as caught:
        room_of(config, {"a": [4 * GROUP_PAGES - 1, 5 * GROUP_PAGES]})
    for said in (
        "transport.shared_memory: ",
        "rollout.train_batch_groups=4 groups",
        "leave room for 3;",
        f"up to {max_group_bytes(config)} bytes",
    ):
        assert said in str(caught.value)


def test_stores_without_a_limit_share_what_is_free() -> None:
    config = rollout_config(max_context_tokens=56, store_bytes=0)
    room = room_of(config, {"a": [9 * GROUP_PAGES, 9 * GROUP_PAGES], "b": [7 * GROUP_PAGES]})
    assert room.on_node == {"a": 9, "b": 7}
    assert room.on_worker > 9
    room_of(config, {"a": [0, 0]})  # not known


@in_virtual_time
async def test_fields_that_a_workflow_adds_take_room() -> None:
    config = rollout_config(max_context_tokens=56)
    report = WorkerReport("rollout/0", "life", "", 1, "a", 4 * GROUP_PAGES)
    member: Any = SimpleNamespace(
        name="rollout/0", index=0, has_lived=True, life=serving_life(), worker=report
    )
    background = Background(1.0, lambda: "")
    workers = WorkerSet(config, background, lambda run: True, lambda event: None)
    workers.track([member])
    workers.reserve(NO_FIELDS)
    assert workers.holds_batch
    workers.reserve(FieldBytes(PAGE_BYTES))
    assert not workers.holds_batch
    with pytest.raises(ConfigError, match="leave room for 0;") as caught:
        workers.check_room()
    assert str(max_group_bytes(config, FieldBytes(PAGE_BYTES))) in str(caught.value)
    await background.close()
