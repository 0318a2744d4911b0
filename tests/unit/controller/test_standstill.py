"""A person pauses a run, and changes the number of its workers, in virtual time."""

from __future__ import annotations

import asyncio

import pytest
from simulation.behavior import Behavior
from simulation.settings import Settings
from simulation.training_run import TrainingRun
from simulation.virtual_loop import run_virtual

from areal_sc.controller.standstill import Standstill
from areal_sc.errors import StepLost
from areal_sc.run.wishes import PauseWish, RunWishes, ScaleWish

PAUSE = RunWishes(pause=PauseWish(since=0.0, by="a test"))
SHORT = {"group_timeout_s": 60.0, "weight_step_timeout_s": 10.0}
LONG_S = 2000.0
"""Of virtual time: longer than any limit of a run with such settings."""


async def until_still(run: TrainingRun) -> None:
    # there is no event for it: people look at the status, too
    while not run.rollout.standstill.is_held or run.rollout._status().num_running:  # noqa: ASYNC110
        await asyncio.sleep(1.0)


def test_a_paused_run_computes_nothing_and_no_limit_passes() -> None:
    run = TrainingRun(Settings(num_steps=8, behavior=Behavior(generation_s=3.0), **SHORT))
    told: list[str] = []

    async def play() -> None:
        async with run.started():
            run.rollout.rejections.on_warning = told.append
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


def test_evaluations_and_batches_outside_of_training_stand_still_too() -> None:
    run = TrainingRun(Settings(behavior=Behavior(generation_s=3.0), **SHORT))

    async def play() -> None:
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

    run_virtual(play())


def test_a_script_that_is_to_end_leaves_a_pause() -> None:
    async def play() -> None:
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

    run_virtual(play())


def test_a_wish_for_workers_is_answered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    run = TrainingRun(Settings(num_rollout_workers=2, num_steps=6))
    answers: list[tuple[int, str]] = []

    def answer(wish: ScaleWish, refusal: str) -> None:
        answers.append((wish.num_workers, refusal))

    monkeypatch.setattr(run.rollout._scaling, "_answer", answer)

    def wish(num_workers: int) -> RunWishes:
        return RunWishes(scale=ScaleWish(num_workers, f"of {num_workers}", "a test"))

    async def play() -> None:
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

    run_virtual(play())
