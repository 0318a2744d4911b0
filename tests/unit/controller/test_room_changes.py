"""Stores that have less room than when their groups were admitted: the run goes on, or says why."""

from __future__ import annotations

import asyncio

import pytest
from simulation.behavior import Behavior
from simulation.fault_run import MAX_TURNS, FaultRun
from simulation.faults import Fault, FaultKind
from simulation.network import Stage
from simulation.scenario import Scenario
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.config.schema import AdmissionMode, OverBound
from areal_sc.controller.ledger.group import GroupState
from areal_sc.errors import ConfigError
from areal_sc.transport.shards.arena import block_span


def killed_in_training(step: int, **changes: object) -> FaultRun:
    """Played to its end: the script is killed while a batch trains, and started again.

    Its stores hold no more than a batch from then on.
    """
    settings = Settings(
        num_steps=6,
        over_bound=OverBound.wait,
        max_staleness=3,
        admission=AdmissionMode.eager,
        batch_groups=4,
        num_rollout_workers=1,
        group_timeout_s=60.0,
        max_deaths=1000,
        behavior=Behavior(generation_s=0.5, training_s=6.0),
    )
    for name, value in changes.items():
        setattr(settings, name, value)
    least = -(-settings.batch_groups // settings.num_rollout_workers)
    kill = Fault(FaultKind.kill_controllers, 0, None, Stage.sent, "update", step)
    scenario = Scenario(
        settings=settings,
        faults=[kill],
        duplication=0.0,
        jitter_s=0.0,
        snapshot_every=0,
        segment_bytes=4 << 20,
        restart_s=1.0,
        later_stores=(least,),
    )
    run = FaultRun(scenario)
    run_virtual(run.play(), max_virtual_s=3000.0, max_turns=MAX_TURNS)
    assert run.ends == {"killed": 1}
    return run


@pytest.mark.parametrize(
    ("mode", "max_concurrent_groups", "num_workers"),
    [*((mode, 64, 1) for mode in OverBound), (OverBound.wait, 2, 2)],
)
def test_a_start_with_smaller_stores_trains_what_was_admitted_before(
    mode: OverBound, max_concurrent_groups: int, num_workers: int
) -> None:
    """Younger groups must not take the room of the batch whose rows went with its workers."""
    killed_in_training(
        3,
        over_bound=mode,
        max_concurrent_groups=max_concurrent_groups,
        num_rollout_workers=num_workers,
    )


async def restarted_in_less_memory(room_groups: int) -> TrainingRun:
    """A run whose worker is killed, and then finds room for so many groups.

    It is killed when the next batch waits for old groups, and younger ones are finished.
    """
    settings = Settings(
        num_steps=6,
        over_bound=OverBound.wait,
        max_staleness=3,
        admission=AdmissionMode.eager,
        batch_groups=4,
        num_rollout_workers=1,
        behavior=Behavior(generation_s=lambda rng: rng.choice([1.0, 1.0, 1.0, 1000.0])),
    )
    run = TrainingRun(settings)
    run.has_other_room = True
    async with run.started():
        ledger = run.rollout.groups.ledger
        while True:
            asking = asyncio.create_task(run.step(checks_business=False))
            await asyncio.sleep(100.0)
            if not asking.done():
                break
        assert ledger.num(GroupState.finished) >= settings.batch_groups, "others are waited for"
        episode_bytes = settings.group_bytes // settings.group_size
        run.cluster.room_bytes = room_groups * settings.group_size * block_span(episode_bytes)
        run.cluster.rollout_workers[0].end("signal 9 (SIGKILL)")
        await asking
        while run.actor.version < settings.num_steps:
            await run.step(checks_business=False)
        await run.check_end()
    return run


def test_finished_groups_give_their_room_to_older_ones(caplog: pytest.LogCaptureFixture) -> None:
    """Else the older ones, without which there is no batch, would wait for it for ever."""
    run_virtual(restarted_in_less_memory(4))
    assert "groups that are finished give theirs to older ones" in caplog.text


def test_memory_that_holds_no_batch_any_more_ends_the_run_with_the_setting() -> None:
    with pytest.raises(ConfigError, match=r"transport.shared_memory: .*leave room for 3;"):
        run_virtual(restarted_in_less_memory(3))
