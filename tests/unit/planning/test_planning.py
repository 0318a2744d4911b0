"""Forecasts against what follows from the costs by hand, and what is advised by them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import pytest

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.ppo_settings import PPOConfig
from areal_sc.config.schema import ActorConfig, AdmissionMode, GRPOConfig, RolloutConfig
from areal_sc.engines.busy_time import TurnSums
from areal_sc.errors import ConfigError
from areal_sc.planning.advice import Plan, make_plan
from areal_sc.planning.cores import SharedCores, shared_cores
from areal_sc.planning.figures import (
    MIN_STEPS,
    Figures,
    OperatingPoint,
    Training,
    Turn,
    all_figures,
    newest_figures,
)
from areal_sc.planning.forecast import Forecaster
from areal_sc.planning.lengths import Lengths, fit_lengths
from areal_sc.planning.simulated_run import Forecast, SimulatedRun
from areal_sc.records.metrics import StepMetrics
from areal_sc.system.cgroups import num_cores
from areal_sc.trainer.advice import NUM_STEPS, Adviser

MakeStep = Callable[..., StepMetrics]

SLOTS = 32
"""Running answers of a worker, which are as many as a batch has: sixteen groups of two."""


def config_of(**changes: Any) -> GRPOConfig:
    values = dict(
        train_batch_groups=16,
        group_size=2,
        max_running_sequences=SLOTS,
        admission=AdmissionMode.eager,
    )
    return GRPOConfig(rollout=RolloutConfig(**values | changes))


def figures_of(point: OperatingPoint, **changes: Any) -> Figures:
    """Answers of 100 tokens each, one token in 10 ms whatever runs beside it; steps of 2 s."""
    values: dict[str, Any] = dict(
        first_step=1,
        last_step=40,
        step_s=2.0,
        wait_s=0.0,
        training=Training(0.0, 2.0 * point.num_train_workers, 0.0),
        rest_s=0.0,
        group_s=1.0,
        prompt_tokens=0.0,
        mean_tokens=100.0,
        longest_tokens=100.0,
        longest_std=0.0,
        longest_max=100.0,
        busy_share=0.5,
        num_running=32.0,
        turn=Turn(0.01, 0.0),
        update_s=0.0,
        recompute_s=0.0,
        recomputed_tokens=0.0,
    )
    return Figures(point, **values | changes)


def test_where_training_is_the_bound_it_is_divided_among_the_ranks() -> None:
    present = OperatingPoint(2, 1, 2)
    forecaster = Forecaster(figures_of(present), config_of())
    assert forecaster.error == pytest.approx(0, abs=1e-9)
    for num_ranks, step_s in {1: 4.0, 2: 2.0, 3: 4 / 3}.items():
        found = forecaster.at(replace(present, num_train_workers=num_ranks))
        assert found.step_s == pytest.approx(step_s)
        assert found.wait_s == pytest.approx(0, abs=0.01)
        assert found.group_s == pytest.approx(1)


def test_what_does_not_depend_on_tokens_stays_with_more_ranks() -> None:
    present = OperatingPoint(2, 1, 2)
    forecaster = Forecaster(figures_of(present, training=Training(1.2, 1.6, 0.1)), config_of())
    for num_ranks, step_s in {1: 2.8, 2: 2.0, 4: 1.6}.items():
        found = forecaster.at(replace(present, num_train_workers=num_ranks))
        assert found.step_s == pytest.approx(step_s)


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_where_generation_is_the_bound_it_is_divided_among_the_workers(num_workers: int) -> None:
    """Sixteen slots a worker, and 32 answers of 1 s a step."""
    present = OperatingPoint(1, 1, 1)
    figures = figures_of(present, training=Training(0.0, 0.01, 0.0), wait_s=1.99, group_s=1.0)
    forecaster = Forecaster(figures, config_of(max_running_sequences=16))
    assert forecaster.error == pytest.approx(0, abs=0.02)
    found = forecaster.at(replace(present, num_rollout_workers=num_workers))
    assert found.step_s == pytest.approx(2 / num_workers, rel=0.05)


def test_without_staleness_one_side_follows_the_other() -> None:
    forecaster = Forecaster(figures_of(OperatingPoint(1, 1, 2)), config_of())
    found = forecaster.at(OperatingPoint(1, 1, 0))
    assert found.step_s == pytest.approx(3)  # 1 s for all answers at one time, and 2 s
    assert (found.wait_s, found.staleness) == (pytest.approx(1), 0)


def test_a_busy_server_is_slower() -> None:
    """Turns take 2 ms, and 1 ms for each answer that runs: 16 on each of two, or 4 on eight."""
    present = OperatingPoint(1, 2, 1)
    figures = figures_of(
        present,
        training=Training(0.0, 1e-3, 0.0),
        step_s=0.6,
        wait_s=0.599,
        turn=Turn(0.002, 0.001),
    )
    forecaster = Forecaster(figures, config_of())
    at_0 = [forecaster.at(OperatingPoint(1, workers, 0)).step_s for workers in (2, 8)]
    assert at_0[1] / at_0[0] == pytest.approx((0.002 + 0.004) / (0.002 + 0.016), rel=0.05)


def test_cores_that_are_shared_slow_down_all() -> None:
    figures = figures_of(OperatingPoint(1, 1, 2))
    config = config_of()
    alone, shared = (Forecaster(figures, config, cores) for cores in (None, SharedCores(2)))
    more = OperatingPoint(4, 1, 2)
    assert alone.at(more).step_s == pytest.approx(0.5 * 2, rel=0.1)  # generation, 1 s
    assert shared.at(more).step_s > 1.5 * alone.at(more).step_s


@pytest.mark.parametrize("beside_s", [0.0, 0.1])
@pytest.mark.parametrize(
    ("measured", "asked"),
    [
        (OperatingPoint(1, 1, 2), OperatingPoint(1, 1, 0)),
        (OperatingPoint(1, 1, 0), OperatingPoint(1, 1, 2)),
        (OperatingPoint(1, 3, 2), OperatingPoint(1, 1, 2)),
        (OperatingPoint(1, 1, 2), OperatingPoint(1, 3, 2)),
    ],
)
def test_what_was_measured_beside_something_else_is_faster_alone(
    measured: OperatingPoint, asked: OperatingPoint, beside_s: float
) -> None:
    """Against simulated runs whose costs are known, and of which only the times are told."""
    cores, config = SharedCores(2, 0.5), config_of()
    lengths = fit_lengths(100.0, 130.0, 20.0, 200.0, 2)
    costs = figures_of(
        measured,
        training=Training(0.0, 1.4, 0.0),
        rest_s=0.2,
        turn=Turn(0.005, 0.0003),
        update_s=0.02,
        longest_tokens=130.0,
        longest_std=20.0,
        longest_max=200.0,
    )

    def run(point: OperatingPoint) -> Forecast:
        simulation = SimulatedRun(costs, config, point, lengths, beside_s, cores, 0.0)
        return simulation.forecast()

    told, expected = run(measured), run(asked)
    of_training, of_generation = told.pace.training, told.pace.generation
    seen = replace(
        costs,
        step_s=told.step_s,
        wait_s=told.wait_s,
        group_s=told.group_s,
        training=Training(0.0, 1.4 / of_training, 0.0),
        rest_s=0.2 / of_training,
        turn=Turn(0.005 / of_generation, 0.0003 / of_generation),
        update_s=0.02 / of_generation,
    )
    found = Forecaster(seen, config, cores).at(asked)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.03)


def test_speed_of_threads_that_compute_together() -> None:
    cores = SharedCores(4, 0.7)
    assert [cores.speed(n) for n in (0, 1, 4, 8)] == pytest.approx([1, 1, 0.7, 0.35])
    assert 0.7 < cores.speed(3) < cores.speed(2) < 1
    assert SharedCores(1, 0.9).speed(2) == pytest.approx(0.45)


def test_how_fast_cores_are_together_is_tried_out() -> None:
    cores = shared_cores(config_of())
    assert cores is not None
    assert cores.number == num_cores()
    assert 0.1 < cores.together <= 1
    assert 0 < cores.free_share <= 1


def test_what_the_simulation_leaves_out_corrects_all_forecasts() -> None:
    figures = figures_of(OperatingPoint(1, 1, 2), step_s=2.5)
    forecaster = Forecaster(figures, config_of())
    assert forecaster.error == pytest.approx(0.25)
    assert forecaster.at(figures.point).step_s == pytest.approx(2.5)
    assert forecaster.at(OperatingPoint(1, 1, 3)).step_s == pytest.approx(2.5)


def counted(number: int, scale: float = 1.0) -> Mapping[str, float]:
    """A hundred turns of 10 ms a step, with 32 answers."""
    turns = TurnSums()
    turns.add(number * 3200, 32, 0.01)
    return {n: scale * value for n, value in {**asdict(turns), "busy_s": number}.items()}


@pytest.fixture
def make_steps(make_step: MakeStep) -> Callable[..., list[StepMetrics]]:
    def make(numbers: Sequence[int], scale: float = 1.0, **changes: Any) -> list[StepMetrics]:
        values: dict[str, Any] = dict(
            num_train_workers=1,
            num_rollout_workers=1,
            max_staleness=1,
            step_time_s=2.0,
            wait_s=0.0,
            train_s=1.9,
            sync_s=0.1,
            group_time_s=1.0,
            longest_tokens_mean=100.0,
            longest_tokens_std=5.0,
            longest_tokens_max=112,
            group_staleness_max=1,
            num_rows=32,
            num_trained_tokens=3200,
        )
        return [
            make_step(number, counters=counted(number, scale), **values | changes)
            for number in numbers
        ]

    return make


MakeSteps = Callable[..., list[StepMetrics]]


def test_the_figures_of_each_point(make_steps: MakeSteps) -> None:
    steps = make_steps(range(1, 21))
    steps += make_steps(range(21, 41), num_rollout_workers=2, step_time_s=1.0, train_s=0.8)
    first, second = all_figures(steps, config_of())
    assert (first.point, second.point) == (OperatingPoint(1, 1, 1), OperatingPoint(1, 2, 1))
    assert (first.first_step, first.last_step) == (5, 20)
    assert (first.step_s, second.step_s) == (2.0, 1.0)
    assert second.training.seconds(1) == pytest.approx(0.8)
    assert (first.busy_share, second.busy_share) == (0.5, 0.5)
    assert first.num_running == 32
    assert first.turn.seconds(32) == pytest.approx(0.01)
    assert first.rest_s == pytest.approx(0.1)
    assert (first.mean_tokens, first.longest_tokens) == (100, 100)
    assert newest_figures(steps, config_of()) == second


def test_turns_follow_the_numbers_of_running_answers(make_steps: MakeSteps) -> None:
    """A turn takes 2 ms and 1 ms an answer, of which 4 or 12 run."""
    steps = make_steps(range(1, 31))
    turns = TurnSums()
    for number, step in enumerate(steps):
        running = 4 if number % 2 else 12
        turns.add(1000, running, 0.002 + 0.001 * running)
        steps[number] = replace(step, counters={**asdict(turns), "busy_s": float(number)})
    figures = newest_figures(steps, config_of())
    assert figures is not None
    for running in (1, 8, 32):
        expected = pytest.approx(0.002 + 0.001 * running, rel=0.01)
        assert figures.turn.seconds(running) == expected


def test_steps_that_tell_too_little(make_steps: MakeSteps) -> None:
    assert newest_figures([], config_of()) is None
    assert newest_figures(make_steps(range(1, MIN_STEPS)), config_of()) is None
    unknown = [replace(step, counters={}) for step in make_steps(range(1, 41))]
    assert newest_figures(unknown, config_of()) is None
    old = make_steps(range(1, 41), num_train_workers=0)  # of an earlier areal_sc
    assert newest_figures(old, config_of()) is None
    # the point was changed just now: the one before is not the present one
    steps = make_steps(range(1, 41))
    changed = make_steps(range(41, 44), max_staleness=2)
    assert newest_figures([*steps, *changed], config_of()) is None
    assert len(all_figures([*steps, *changed], config_of())) == 1


def test_counters_that_begin_anew_are_left_out(make_steps: MakeSteps) -> None:
    steps = make_steps(range(1, 31)) + make_steps(range(31, 51), scale=0.5)
    figures = newest_figures(steps, config_of())
    assert figures is not None
    assert figures.num_running == 32
    assert figures.busy_share == pytest.approx(0.5 * (24 + 19 * 0.5) / 43, rel=0.2)


def plan_of(steps: Sequence[StepMetrics], config: GRPOConfig, devices: int | None = None) -> Plan:
    plan = make_plan(steps, config, devices, cores=None)
    assert plan is not None
    return plan


def test_devices_go_where_they_are_needed(make_steps: MakeSteps) -> None:
    """Training takes 6 device-seconds a step, generation 1: of eight, most should train."""
    steps = make_steps(
        range(1, 41), num_train_workers=2, num_rollout_workers=6, step_time_s=3.0, train_s=2.9
    )
    config = config_of()
    config.actor.parallel.data = 2
    plan = plan_of(steps, config)
    point = plan.advised.point
    assert point.num_train_workers + point.num_rollout_workers == 8
    assert point.num_train_workers >= 5
    assert plan.saved_share > 0.5
    assert f"actor.parallel.data={point.num_train_workers}" in plan.settings
    assert f"rollout.num_workers={point.num_rollout_workers}" in plan.settings
    more = plan_of(steps, config, 16)
    assert more.advised.step_s < plan.advised.step_s
    assert plan_of(steps, config, 2).advised.point.num_train_workers == 1


def test_ranks_that_hold_a_model_together_stay_together(make_steps: MakeSteps) -> None:
    class Pairs(ParallelConfig):
        @property
        def num_ranks(self) -> int:
            return 2 * self.data

    steps = make_steps(range(1, 41), num_train_workers=2, num_rollout_workers=6)
    plan = plan_of(
        steps, GRPOConfig(actor=ActorConfig(parallel=Pairs()), rollout=config_of().rollout)
    )
    assert {forecast.point.num_train_workers % 2 for forecast in plan.tried} == {0}


def test_a_bound_that_nobody_needs_is_lowered(make_steps: MakeSteps) -> None:
    steps = make_steps(range(1, 61), max_staleness=8)
    just_in_time = config_of(max_staleness=8, admission=AdmissionMode.just_in_time)
    plan = plan_of(steps, just_in_time)  # which has data as fresh already
    assert plan.settings == ""
    plan = plan_of(steps, config_of(max_staleness=8))
    assert plan.settings in ("rollout.max_staleness=1", "rollout.max_staleness=2")
    assert plan.advised.step_s == pytest.approx(plan.present.step_s, rel=0.02)
    assert plan.advised.staleness < plan.present.staleness - 4


def test_a_bound_that_just_suffices_is_raised_by_one_to_spare(make_steps: MakeSteps) -> None:
    plan = plan_of(make_steps(range(1, 61), max_staleness=1), config_of(max_staleness=1))
    assert plan.settings == "rollout.max_staleness=2"
    assert plan.advised.step_s == pytest.approx(plan.present.step_s, rel=0.02)


@pytest.mark.parametrize(
    ("advantage", "most"), [("group", 16), ("batch", 2), ("none", 2), ("mine:advantage", 1)]
)
def test_no_bound_is_advised_that_the_algorithm_was_not_seen_to_bear(
    advantage: str, most: int, make_steps: MakeSteps
) -> None:
    """A group takes fifty steps: nothing waits for it at bound 50 alone."""
    steps = make_steps(range(1, 61), step_time_s=0.4, train_s=0.02, sync_s=0.0, group_time_s=20.0)
    config = config_of(max_staleness=1)
    config.actor = ActorConfig(ppo=PPOConfig(advantage=advantage))
    plan = plan_of(steps, config)
    assert max(it.point.max_staleness for it in plan.tried) == most
    assert plan.advised.point.max_staleness == most


def test_earlier_forecasts_are_judged(make_steps: MakeSteps) -> None:
    steps = make_steps(range(1, 41))
    steps += make_steps(range(41, 81), num_train_workers=2, train_s=0.9, step_time_s=1.1)
    (earlier,) = plan_of(steps, config_of()).earlier
    assert earlier.source.point == OperatingPoint(1, 1, 1)
    assert earlier.measured_s == pytest.approx(1.1)
    assert earlier.forecast.step_s == pytest.approx(1.9 * (0.1 + 0.9 / 2) + 0.1, rel=0.02)
    assert earlier.error == pytest.approx(earlier.forecast.step_s / 1.1 - 1)


def test_a_trainer_that_waits_is_told_once(make_steps: MakeSteps) -> None:
    adviser = Adviser(config_of(), Path("runs/mine"))
    steps = make_steps(range(1, 3 * NUM_STEPS), wait_s=1.0, train_s=0.9)
    told = [list(adviser.on_step(step)) for step in steps]
    assert [len(texts) for texts in told].index(1) == NUM_STEPS
    (text,) = chain.from_iterable(told)
    assert "waits for episodes 50% of the time" in text
    assert "python -m areal_sc plan runs/mine" in text
    adviser = Adviser(config_of(), Path("runs/mine"))
    steps = make_steps(range(1, 3 * NUM_STEPS), 0.2, wait_s=1.0, train_s=0.9)
    (text,) = chain.from_iterable(adviser.on_step(step) for step in steps)
    assert "50% of the time, and servers generate 10% of it only: rewards" in text
    assert "python -m areal_sc page runs/mine" in text
    adviser = Adviser(config_of(), Path("runs/mine"))
    assert not any(list(adviser.on_step(step)) for step in make_steps(range(1, 60)))


def test_the_end_of_a_run_names_what_is_worth_it(make_steps: MakeSteps) -> None:
    config = config_of()
    config.actor.parallel.data = 2
    values = dict(num_train_workers=2, num_rollout_workers=6, step_time_s=3.0, train_s=2.9)
    text = Adviser(config, Path("mine")).at_end(make_steps(range(1, 41), **values))
    assert text is None or "a step would take" in text  # where cores are shared it may not be
    assert Adviser(config, Path("mine")).at_end(make_steps(range(1, 5))) is None
    assert Adviser(config_of(), Path("mine")).at_end(make_steps(range(1, 41))) is None
    config.rollout.train_batch_groups = 1024  # a plan of so many answers would take long
    assert Adviser(config, Path("mine")).at_end(make_steps(range(1, 41), **values)) is None


@pytest.mark.parametrize(
    ("lengths", "group_size"),
    [
        (Lengths(8.7, 0.0, 0.9, 27_648), 8),
        (Lengths(8.7, 0.5, 0.6, 27_648), 8),
        (Lengths(2.0, 0.55, 0.05, 27), 8),  # answers to one prompt are alike
        (Lengths(6.0, 0.3, 0.3, 2_000), 16),
    ],
)
def test_lengths_are_found_again(lengths: Lengths, group_size: int) -> None:
    rng = random.Random(1)
    groups = [lengths.draw(rng, group_size) for _ in range(10_000)]
    longest = [max(group) for group in groups]
    mean = fmean(chain.from_iterable(groups))
    found = fit_lengths(mean, fmean(longest), pstdev(longest), lengths.most, group_size)
    assert found.location == pytest.approx(lengths.location, rel=0.01)
    assert found.of_group == pytest.approx(lengths.of_group, abs=0.1)
    assert found.of_answer == pytest.approx(lengths.of_answer, abs=0.02)


@pytest.mark.parametrize(
    ("mean", "longest", "deviation", "group_size"),
    [(7.0, 7.0, 0.0, 4), (32.0, 32.0, 0.0, 4), (16.0, 16.0, 16.0, 1), (1.0, 32.0, 0.0, 4)],
)
def test_lengths_at_the_edges(
    mean: float, longest: float, deviation: float, group_size: int
) -> None:
    lengths = fit_lengths(mean, longest, deviation, 32.0, group_size)
    rng = random.Random(1)
    found = fmean(max(lengths.draw(rng, group_size)) for _ in range(2_000))
    assert found == pytest.approx(longest, rel=0.2)


def test_new_weights_stop_servers(make_steps: MakeSteps) -> None:
    """0.1 s for each update, and 0.4 s for 2,000 tokens whose keys and values it ends."""
    loads = {"weight_updates": 1.0, "update_stall_s": 0.1}
    recomputed = {"recompute_s": 0.4, "recomputed_tokens": 2_000.0}

    def found(each: Mapping[str, float]) -> Figures:
        steps = [
            replace(
                step,
                mean_sequence_length=110.0,
                counters={**step.counters, **{name: n * number for name, n in each.items()}},
            )
            for number, step in enumerate(make_steps(range(1, 41)))
        ]
        figures = newest_figures(steps, config_of())
        assert figures is not None
        return figures

    figures = found(loads | recomputed)
    assert figures.update_s == pytest.approx(0.1)
    assert figures.prompt_tokens == pytest.approx(10)
    assert (figures.recompute_s, figures.recomputed_tokens) == pytest.approx((0.4, 2_000))
    figures = found(loads)  # as servers count
    assert (figures.update_s, figures.recompute_s) == pytest.approx((0.1, 0))


def test_an_update_costs_more_the_more_tokens_servers_hold() -> None:
    """Generation of 1 s is the bound. 32 answers have just begun when a step's update comes."""
    present = OperatingPoint(1, 1, 2)
    values = dict(training=Training(0.0, 0.01, 0.0), wait_s=0.99, step_s=1.0, prompt_tokens=100.0)
    costs = dict(update_s=0.1, recompute_s=0.32)

    def raw_s(point: OperatingPoint, **changes: Any) -> float:
        forecaster = Forecaster(figures_of(present, **values | changes), config_of())
        assert forecaster.at(present).step_s == pytest.approx(1.0)
        return forecaster.at(point).step_s / (1 + forecaster.error)

    assert raw_s(present) == pytest.approx(1, abs=0.02)
    assert raw_s(present, **costs) == pytest.approx(1.42, abs=0.03)
    # without staleness nothing runs then
    assert raw_s(replace(present, max_staleness=0), **costs) == pytest.approx(1.11, abs=0.01)
    # in truth servers held twice as much, so a token costs half
    twice = dict(recomputed_tokens=2 * 32 * 101)
    assert raw_s(present, **costs | twice) == pytest.approx(1.26, abs=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_fixed_part_of_training_is_found(make_steps: MakeSteps, noise: float) -> None:
    """0.6 s, and 1.2 s for the tokens of a usual step by two ranks; their number varies by 10 %."""
    rng = random.Random(1)
    steps = []
    for step in make_steps(range(1, 61), num_train_workers=2):
        share = rng.gauss(1.0, 0.1)
        train_s = 0.6 + 1.2 * share + rng.gauss(0.0, noise)
        if step.step % 10 == 5:
            train_s += rng.uniform(0.5, 3.0)  # a machine that did something else meanwhile
        steps.append(replace(step, train_s=train_s, mean_sequence_length=500 * share))
    figures = newest_figures(steps, config_of())
    assert figures is not None
    training = figures.training
    counted = steps[figures.first_step - 1 :]
    assert training.seconds(2) == pytest.approx(fmean(step.train_s for step in counted))
    divided_s = 1.2 * fmean(step.mean_sequence_length for step in counted) / 500
    assert training.divided_s / 2 == pytest.approx(divided_s, abs=1e-6 + 3 * training.std_s)
    assert training.std_s <= 1e-6 + 2 * noise


def test_where_steps_do_not_tell_most_of_training_is_divided(make_steps: MakeSteps) -> None:
    rng = random.Random(1)
    same = make_steps(range(1, 61), train_s=2.0, mean_sequence_length=500.0)
    # times that vary by more than 1 % of the tokens can explain
    nearly = [
        replace(step, train_s=rng.gauss(2.0, 0.2), mean_sequence_length=500 * rng.gauss(1.0, 0.01))
        for step in same
    ]
    for steps in (same, nearly):
        figures = newest_figures(steps, config_of())
        assert figures is not None
        training = figures.training
        assert training.divided_s == pytest.approx(0.9 * training.seconds(1), rel=0.05)
        assert training.std_s == pytest.approx(0.15 * training.seconds(1), rel=0.15)


def test_on_shared_cores_the_number_of_ranks_stays(make_steps: MakeSteps) -> None:
    steps = make_steps(range(1, 41), num_rollout_workers=2)
    plan = make_plan(steps, config_of(), cores=SharedCores(2))
    assert plan is not None
    assert {forecast.point.num_train_workers for forecast in plan.tried} == {1}
    assert {forecast.point.num_rollout_workers for forecast in plan.tried} == {1, 2}
    two_ranks = make_steps(range(1, 41), num_train_workers=2, num_rollout_workers=4)
    with pytest.raises(ConfigError, match="2 devices are too few: 2 for training and 1 for"):
        make_plan(two_ranks, config_of(), 2, cores=SharedCores(4))


def test_another_split_has_to_gain_something(make_steps: MakeSteps) -> None:
    """Training takes as long whether one worker generates or two."""
    steps = make_steps(range(1, 41), num_rollout_workers=2)
    plan = make_plan(steps, config_of(), cores=SharedCores(8))
    assert plan is not None
    same = [it for it in plan.tried if it.point.num_rollout_workers == 1]
    assert min(it.step_s for it in same) == pytest.approx(plan.present.step_s, rel=0.02)
    assert plan.advised.point.num_rollout_workers == 2


def test_a_number_that_the_run_finds_itself_is_not_advised(make_steps: MakeSteps) -> None:
    steps = make_steps(
        range(1, 41), num_train_workers=2, num_rollout_workers=6, step_time_s=3.0, train_s=2.9
    )
    config = config_of()
    config.actor.parallel.data = 2
    config.rollout.autoscale.max = 8
    assert {it.point.split for it in plan_of(steps, config).tried} == {(2, 6)}
    assert plan_of(steps, config, 8).advised.point.num_train_workers >= 5


def test_ranks_that_share_cores_are_worth_a_try(make_steps: MakeSteps) -> None:
    config = config_of(max_staleness=2)
    config.actor.parallel.data = 2
    steps = make_steps(range(1, 41), num_train_workers=2, max_staleness=2)
    plan = make_plan(steps, config, cores=SharedCores(2))
    assert plan is not None
    assert plan.settings == ""
    assert plan.hint.startswith("try actor.parallel.data=1: ranks share cores here")
    for enough in (SharedCores(3), None):
        plan = make_plan(steps, config, cores=enough)
        assert plan is not None
        assert plan.hint == ""
