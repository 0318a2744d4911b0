"""A person pauses a run, and changes the number of its workers, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from simulation.behavior import Behavior
from simulation.faulty_cluster import FaultyCluster
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import in_virtual_time, run_virtual
from waiting import until

from areal_sc.config.parallel_settings import Placement
from areal_sc.controller.background import Standstill
from areal_sc.errors import StepLost, WorkerLost
from areal_sc.run.run_status import PAUSE_END, SCRIPT, PauseWish, RunWishes, ScaleWish

PAUSE = RunWishes(pause=PauseWish(since=0.0, by="a test"))
SHORT = {"group_timeout_s": 60.0, "weight_step_timeout_s": 10.0}
LONG_S = 2000.0
"""Of virtual time: longer than any limit of a run with such settings."""


async def until_still(run: TrainingRun) -> None:
    await until(lambda: run.rollout.standstill.is_held and not run.rollout._status().num_running)


def test_a_paused_run_computes_nothing_and_no_limit_passes() -> None:
    run = TrainingRun(Settings(num_steps=8, behavior=Behavior(generation_s=3.0), **SHORT))
    told: list[str] = []

    async def play() -> None:
        async with run.started():
            run.rollout.rejections.warn = told.append
            assert run.rollout._background._limit_s < LONG_S / 4
            await run.step()
            steps = asyncio.create_task(rest())
            run.rollout._hear_wishes(PAUSE)
            await until_still(run)
            num_starts, version = len(run.cluster.starts), run.rollout.version
            await asyncio.sleep(LONG_S)
            assert len(run.cluster.starts) == num_starts
            assert run.rollout.version == version
            assert run.rollout._status().is_held
            assert run.rollout.standstill.held_s == 0.0
            run.rollout._hear_wishes(RunWishes())
            await steps
            assert run.rollout.standstill.held_s == pytest.approx(LONG_S, rel=0.01)
            await run.check_end()

    async def rest() -> None:
        for _ in range(7):
            await run.step(checks_business=False)

    run_virtual(play())
    assert told == []
    assert len(run.batches) == 8


@in_virtual_time
async def test_evaluations_and_batches_outside_of_training_stand_still_too() -> None:
    run = TrainingRun(Settings(behavior=Behavior(generation_s=3.0), **SHORT))
    async with run.started():
        rollout = run.rollout
        rollout._hear_wishes(PAUSE)
        calls = [
            asyncio.create_task(rollout.evaluate_async(run.prompts, run.workflow)),
            asyncio.create_task(rollout.rollout_batch_async(run.prompts, run.workflow, 4)),
        ]
        await asyncio.sleep(LONG_S)
        assert not any(call.done() for call in calls)
        assert run.cluster.starts == []
        assert rollout._status().num_running == 0
        rollout._hear_wishes(RunWishes())
        await asyncio.gather(*calls)


@in_virtual_time
async def test_groups_that_run_end_where_training_has_the_card() -> None:
    settings = Settings(
        num_steps=12,
        placement=Placement.turns,
        max_staleness=4,
        behavior=Behavior(generation_s=lambda rng: rng.uniform(1, 30), training_s=2.0),
    )
    run = TrainingRun(settings, FaultyCluster)
    async with run.started():
        for _ in range(2):
            await run.step(checks_business=False)
        step = asyncio.create_task(run.step(checks_business=False))
        run.rollout._hear_wishes(PAUSE)
        async with asyncio.timeout(LONG_S):
            await until_still(run)
        run.rollout._hear_wishes(RunWishes())
        await step


@in_virtual_time
async def test_an_evaluation_that_is_paused_leaves_with_the_script_and_is_told_as_still() -> None:
    run = TrainingRun(Settings(behavior=Behavior(generation_s=3.0), **SHORT))
    async with run.started():
        rollout = run.rollout
        rollout._hear_wishes(PAUSE)
        call = asyncio.create_task(rollout.evaluate_async(run.prompts, run.workflow))
        await asyncio.sleep(LONG_S)
        assert [(it.who, it.what) for it in rollout._status().waits] == [(SCRIPT, PAUSE_END)]
        rollout.standstill.is_left = lambda: True
        with pytest.raises(StepLost, match="paused"):
            async with asyncio.timeout(LONG_S):
                await call
        assert rollout._status().waits == []
        assert rollout.standstill.held_s == 0.0


@in_virtual_time
async def test_a_pause_is_no_wait_for_what_is_lost() -> None:
    run = TrainingRun(Settings())
    async with run.started():
        actor = run.actor
        held = asyncio.create_task(actor.standstill.hold(actor._check_lives))
        await held
        actor._hear_wishes(PAUSE)
        held = asyncio.create_task(actor.standstill.hold(actor._check_lives))
        await asyncio.sleep(5.0)
        assert not held.done()
        actor._give_up(WorkerLost("train/0 has died too often"))
        with pytest.raises(WorkerLost, match="too often"):
            await held


@in_virtual_time
async def test_a_script_without_a_run_tells_of_a_pause_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = TrainingRun(Settings())
    async with run.started():
        for wishes in (PAUSE, RunWishes()):
            for controller in (run.actor, run.rollout):
                controller._hear_wishes(wishes)
        with run.rollout.heard_by(lambda event: None):  # which tells it
            run.rollout._hear_wishes(RunWishes(pause=PauseWish(since=9.0, by="b")))
    told = [it.getMessage() for it in caplog.records if "pause" in it.getMessage()]
    assert len(told) == 2, told
    assert told[0].startswith("the run is paused by a test at 19")
    assert "resume" in told[0]
    assert "is over: the run goes on" in told[1]


@in_virtual_time
async def test_a_script_that_is_to_end_leaves_a_pause() -> None:
    standstill = Standstill()
    await standstill.hold()
    standstill.wish = PAUSE.pause
    held = asyncio.create_task(standstill.hold())
    await asyncio.sleep(5.0)
    assert standstill.is_held
    standstill.is_left = lambda: True
    with pytest.raises(StepLost, match="paused"):
        await held
    assert not standstill.is_held
    assert standstill.held_s == pytest.approx(5.0, abs=0.2)


@in_virtual_time
async def test_a_wish_for_workers_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainingRun(Settings(num_rollout_workers=2, num_steps=6))
    answers: list[tuple[int, str]] = []

    def answer(wish: ScaleWish, refusal: str) -> None:
        answers.append((wish.num_workers, refusal))

    monkeypatch.setattr(run.rollout._scaling, "answer", answer)

    def wish(num_workers: int) -> RunWishes:
        return RunWishes(scale=ScaleWish(num_workers, f"of {num_workers}", "a test"))

    async with run.started():
        run.rollout._hear_wishes(wish(1))  # the first batch is yet to be asked for
        assert run.rollout.num_workers == 2
        await run.step(checks_business=False)
        assert (run.rollout.num_workers, answers) == (1, [(1, "")])
        run.rollout._hear_wishes(wish(1))
        run.rollout._hear_wishes(wish(2))
        await run.step(checks_business=False)
        assert (run.rollout.num_workers, answers) == (2, [(1, ""), (2, "")])
        run.rollout._hear_wishes(wish(0))
        await run.step(checks_business=False)
        assert run.rollout.num_workers == 2
        ((number, refusal),) = answers[2:]
        assert (number, "at least 1" in refusal) == (0, True)
