"""Forecasts against what follows from the times by hand, and what is advised by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from builders import make_step

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActorConfig, AdmissionMode, Device, GRPOConfig, RolloutConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.errors import ConfigError
from areal_sc.planning.advice import (
    MIN_STEPS,
    MeasuredTimes,
    OperatingPoint,
    Plan,
    forecast,
    make_plan,
    measured_times,
    shares_devices,
)
from areal_sc.records.metrics import StepMetrics
from areal_sc.trainer.advice import NUM_STEPS, Adviser


def config_of(**changes: Any) -> GRPOConfig:
    """Training and generation have devices of their own, and a worker 32 places."""
    values = dict(max_running_sequences=32, admission=AdmissionMode.eager)
    config = GRPOConfig(rollout=RolloutConfig(**values | changes))
    config.scheduler.type = SchedulerType.slurm.value
    return config


def make_steps(numbers: Sequence[int], scale: float = 1.0, **changes: Any) -> list[StepMetrics]:
    """In each step of 2 s servers are busy for 1 s with 32 answers; a group takes 1 s."""
    values: dict[str, Any] = dict(
        num_train_workers=1,
        num_rollout_workers=1,
        max_staleness=1,
        step_time_s=2.0,
        wait_s=0.0,
        train_s=1.9,
        group_time_s=1.0,
        group_staleness_max=1,
    )
    return [
        make_step(
            number,
            counters={"busy_s": scale * number, "answer_s": 32 * scale * number},
            **values | changes,
        )
        for number in numbers
    ]


def times_of(steps: Sequence[StepMetrics]) -> MeasuredTimes:
    times = measured_times(steps)
    assert times is not None
    return times


def plan_of(steps: Sequence[StepMetrics], config: GRPOConfig, devices: int | None = None) -> Plan:
    plan = make_plan(steps, config, devices)
    assert plan is not None
    return plan


def step_s(times: MeasuredTimes, *point: int) -> float:
    return forecast(times, config_of().rollout, OperatingPoint(*point)).step_s


def test_the_slower_side_is_the_step() -> None:
    times = times_of(make_steps(range(1, 41), num_rollout_workers=2))
    assert step_s(times, 1, 2, 1) == pytest.approx(2.0), "as measured"
    assert step_s(times, 2, 2, 1) == pytest.approx(0.1 + 1.9 / 2)
    assert step_s(times, 2, 2, 2) == pytest.approx(0.1 + 1.9 / 2)
    assert step_s(times, 4, 2, 4) == pytest.approx(0.1 + 1.9 / 4)
    assert step_s(times, 8, 1, 4) == pytest.approx(1.0), "32 answers of 1 s in 32 places"
    assert step_s(times, 19, 1, 1) == pytest.approx(1.0)
    assert step_s(times, 19, 2, 3) == pytest.approx(0.5)


def test_a_bound_leaves_time_for_a_group_and_a_training() -> None:
    """Of 10 s, and of 2 s."""
    steps = make_steps(range(1, 61), step_time_s=6.0, wait_s=4.0, group_time_s=10.0)
    times = times_of(steps)
    assert [step_s(times, 1, 1, bound) for bound in (0, 1, 2, 5, 9)] == pytest.approx(
        [12.0, 6.0, 4.0, 2.0, 2.0]
    )


def test_what_the_arithmetic_leaves_out_multiplies_all_forecasts() -> None:
    times = times_of(make_steps(range(1, 41), step_time_s=2.5, wait_s=0.5))
    assert step_s(times, 1, 1, 1) == pytest.approx(2.5)
    assert step_s(times, 2, 1, 1) == pytest.approx(2.5 / 2 * (0.1 + 1.9 / 2))


def test_the_times_are_those_of_the_present_point() -> None:
    steps = make_steps(range(1, 21))
    steps += make_steps(range(21, 41), num_rollout_workers=2, step_time_s=1.0, train_s=0.8)
    times = times_of(steps)
    assert times.point == OperatingPoint(1, 2, 1)
    assert (times.first_step, times.last_step) == (25, 40), "admission settles first"
    assert (times.step_s, times.wait_s, times.group_s) == (1.0, 0.0, 1.0)
    assert times.train_s == pytest.approx(0.8)
    assert (times.busy_share, times.answer_s) == (pytest.approx(0.5), pytest.approx(32))


def test_steps_that_tell_too_little() -> None:
    assert measured_times([]) is None
    assert measured_times(make_steps(range(1, MIN_STEPS))) is None
    unknown = [replace(step, counters={}) for step in make_steps(range(1, 41))]
    assert measured_times(unknown) is None
    of_no_group = make_steps(range(1, 41), group_time_s=None)
    assert measured_times(of_no_group) is None
    # the point was changed just now: the one before is not the present one
    changed = make_steps(range(41, 44), max_staleness=2)
    assert measured_times([*make_steps(range(1, 41)), *changed]) is None


def test_counters_that_begin_anew_are_left_out() -> None:
    times = times_of(make_steps(range(1, 31)) + make_steps(range(31, 51), scale=0.5))
    assert times.busy_share == pytest.approx((25 + 19 * 0.5) / 44 / 2)
    assert times.answer_s == pytest.approx(32 * 2 * times.busy_share)


def test_devices_go_where_they_are_needed() -> None:
    """Training takes 7 device-seconds a step, generation 1: of eight, seven should train."""
    steps = make_steps(
        range(1, 41), num_train_workers=2, num_rollout_workers=6, step_time_s=3.5, train_s=3.5
    )
    config = config_of()
    config.actor.parallel.data = 2
    plan = plan_of(steps, config)
    assert plan.advised.point.split == (7, 1)
    assert plan.advised.step_s == pytest.approx(1.0)
    assert 1 - plan.advised.step_s / plan.present.step_s == pytest.approx(5 / 7)
    assert "actor.parallel.data=7 rollout.num_workers=1" in plan.settings
    assert plan_of(steps, config, 16).advised.point.split == (14, 2)
    assert plan_of(steps, config, 2).advised.point.split == (1, 1)
    with pytest.raises(ConfigError, match="1 devices are too few: 1 for training and 1 for"):
        make_plan(steps, config, 1)


def test_ranks_that_hold_a_model_together_stay_together() -> None:
    class Pairs(ParallelConfig):
        @property
        def num_ranks(self) -> int:
            return 2 * self.data

    steps = make_steps(range(1, 41), num_train_workers=2, num_rollout_workers=6)
    config = config_of()
    config.actor = ActorConfig(parallel=Pairs())
    assert {it.point.split for it in plan_of(steps, config).tried} == {(2, 6), (4, 4), (6, 2)}


def test_another_split_has_to_gain_something() -> None:
    """Training takes 2 % less with 51 ranks than with 50."""
    steps = make_steps(range(1, 41), num_train_workers=50, num_rollout_workers=2)
    config = config_of()
    config.actor.parallel.data = 50
    assert plan_of(steps, config).advised.point.split == (50, 2)


def test_a_bound_that_nobody_needs_is_lowered_where_it_makes_data_staler() -> None:
    steps = make_steps(range(1, 61), max_staleness=8)
    just_in_time = config_of(max_staleness=8, admission=AdmissionMode.just_in_time)
    assert plan_of(steps, just_in_time, 2).settings == ""
    assert plan_of(steps, config_of(max_staleness=8), 2).settings == "rollout.max_staleness=2"


def test_a_bound_that_just_suffices_is_raised_by_one_to_spare() -> None:
    plan = plan_of(make_steps(range(1, 61), max_staleness=1), config_of(max_staleness=1))
    assert plan.settings == "rollout.max_staleness=2"
    assert plan.advised.step_s == pytest.approx(plan.present.step_s)


@pytest.mark.parametrize(
    ("advantage", "most"), [("group", 16), ("batch", 2), ("none", 2), ("mine:advantage", 1)]
)
def test_no_bound_is_advised_that_the_algorithm_was_not_seen_to_bear(
    advantage: str, most: int
) -> None:
    """A group takes fifty steps: nothing waits for it at bound 50 alone."""
    steps = make_steps(range(1, 61), step_time_s=0.4, wait_s=0.38, train_s=0.02, group_time_s=20.0)
    config = config_of(max_staleness=1)
    config.actor = ActorConfig(ppo=PPOConfig(advantage=advantage))
    assert plan_of(steps, config).advised.point.max_staleness == most


def test_the_split_stays_where_there_is_none_or_the_run_finds_it() -> None:
    steps = make_steps(
        range(1, 41), num_train_workers=2, num_rollout_workers=6, step_time_s=3.5, train_s=3.5
    )
    config, on_cores = config_of(), config_of()
    config.rollout.autoscale.max = 8
    on_cores.scheduler.type = SchedulerType.local.value
    on_cores.actor.device = on_cores.rollout.device = Device.cpu
    assert (shares_devices(config), shares_devices(on_cores)) == (False, True)
    for fixed in (config, on_cores):
        assert {it.point.split for it in plan_of(steps, fixed).tried} == {(2, 6)}
        assert plan_of(steps, fixed, 8).advised.point.split == (7, 1)


def test_a_trainer_that_waits_is_told_once() -> None:
    def told(scale: float = 1.0, **changes: float) -> list[list[str]]:
        adviser = Adviser(config_of(), Path("runs/mine"))
        steps = make_steps(range(1, 3 * NUM_STEPS), scale, **changes)
        return [list(adviser.on_step(step)) for step in steps]

    found = told(wait_s=1.0, train_s=0.9)
    assert [len(texts) for texts in found].index(1) == NUM_STEPS
    (text,) = chain.from_iterable(found)
    assert "waits for episodes 50% of the time" in text
    assert "python -m areal_sc plan runs/mine" in text
    (text,) = chain.from_iterable(told(0.2, wait_s=1.0, train_s=0.9))
    assert "50% of the time, and servers generate 10% of it only: rewards" in text
    assert "python -m areal_sc page runs/mine" in text
    (text,) = chain.from_iterable(told(0.2))
    assert "servers are busy 10% of the time only" in text
    assert not any(told())
