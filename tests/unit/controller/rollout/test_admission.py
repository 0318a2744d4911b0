"""Admission: its limits for any history, and where the lead settles in virtual time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist, mean

import pytest
from builders import Clock
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.config.schema import AdmissionMode, GenerationConfig, OverBound, RolloutConfig
from areal_sc.controller.rollout.admission import Admission
from areal_sc.controller.rollout.staleness import StalenessPolicy
from areal_sc.errors import ConfigError

BATCH = 16
GROUP_SIZE = 4


def make(
    max_staleness: int = 8,
    mode: AdmissionMode = AdmissionMode.just_in_time,
    total_steps: int = 0,
    clock: Clock | None = None,
) -> Admission:
    config = RolloutConfig(
        path="",
        generation=GenerationConfig(),
        max_staleness=max_staleness,
        train_batch_groups=BATCH,
        group_size=GROUP_SIZE,
        admission=mode,
        total_steps=total_steps,
    )
    policy = StalenessPolicy(max_staleness, BATCH, OverBound.train)
    return Admission(config, policy, clock or Clock())


slacks = st.lists(st.tuples(st.floats(0, 3), st.floats(0, 3), st.floats(0.01, 3)), max_size=30)


@given(eta=st.integers(0, 8), history=slacks, version=st.integers(0, 50), extra=st.integers(0, 200))
def test_whatever_was_measured_eq_3_holds_and_a_batch_can_be_formed(
    eta: int, history: list[tuple[float, float, float]], version: int, extra: int
) -> None:
    clock = Clock()
    admission = make(eta, clock=clock)
    for number, (stood_s, waited_s, trained_s) in enumerate(history):
        admission.note_finished(BATCH)
        clock.now_s += stood_s
        admission.note_end("rollout/0", num_waiting=100 * (number % 3))
        admission.note_asked(version)
        clock.now_s += waited_s
        admission.note_batch(0)
        clock.now_s += trained_s
        assert min(1, eta) <= admission.lead <= eta
    num_counted = version * BATCH + extra
    number = admission.num_admissible(version, num_counted)
    assert 0 <= number <= max(0, (version + eta + 1) * BATCH - num_counted)
    assert extra + number >= BATCH


def test_nothing_is_admitted_beyond_the_last_step() -> None:
    admission = make(4, AdmissionMode.eager, total_steps=3)
    assert admission.num_admissible(1, 2 * BATCH) == BATCH
    admission.note_asked(2)
    with pytest.raises(ConfigError, match="no batch for policy version 3: total_steps is 3"):
        admission.note_asked(3)


def test_a_batch_of_unknown_times_changes_nothing() -> None:
    clock = Clock()
    admission = make(clock=clock)
    for _ in range(3):  # as of groups that an earlier start has finished
        admission.note_asked(0)
        admission.note_batch(0)
        assert admission.slack is None
    assert admission.lead == 1
    admission.note_finished(BATCH)
    admission.forget()
    admission.note_asked(0)
    admission.note_batch(0)
    assert admission.slack is None


def test_a_later_start_goes_on_with_the_lead_that_it_finds() -> None:
    admission = make()
    admission.go_on(10, 10 * BATCH + BATCH * 7 // 2)
    assert admission.lead == 2.5
    admission.go_on(10, 0)
    assert admission.lead == 1


@dataclass
class Run:
    """Means over the later half of a simulated run; times are in those of a training step."""

    step: float
    staleness: float
    leads: list[float]


def simulated(
    mode: AdmissionMode,
    latency: float,
    load: float,
    num_steps: int = 80,
    doubles_at: int = 0,
    places: int = 1 << 30,
) -> Run:
    """Groups share the generators' rate, and none is faster than alone.

    Args:
        latency: median time of a group alone, lognormal with sigma 0.9; as many groups as a batch
            has have the same times in another order.
        load: generation's work a step, as a share of what it can do meanwhile.
        doubles_at: from this step on all groups are twice as long.
        places: groups that run at one time; others wait.
    """
    rng, training, clock = random.Random(0), random.Random(1), Clock()
    ranks = [(k + 0.5) / BATCH for k in range(BATCH)]
    times = [latency * math.exp(0.9 * NormalDist().inv_cdf(rank)) for rank in ranks]
    order: list[float] = []
    admission = make(8, mode, clock=clock)
    rate = sum(times) / load
    version = num_counted = num_batches = 0
    is_training, trained_s, batch_s, factor = False, math.inf, 0.0, 1.0
    open_groups: list[tuple[float, int]] = []  # work that is left, version of admission
    finished: list[int] = []
    run, steps, staleness = Run(0, 0, []), [], []
    admission.note_asked(0)
    while num_batches < num_steps:
        for _ in range(admission.num_admissible(version, num_counted)):
            order = order or rng.sample(times, BATCH)
            open_groups.append((factor * order.pop(), version))
            num_counted += 1
        if not is_training and len(finished) >= BATCH:
            finished.sort()
            staleness.append(version - mean(finished[:BATCH]))
            del finished[:BATCH]
            admission.note_batch(len(finished))
            steps.append(clock.now_s - batch_s)
            run.leads.append(admission.lead)
            batch_s, num_batches, is_training = clock.now_s, num_batches + 1, True
            factor = 2.0 if 0 < doubles_at <= num_batches else 1.0
            trained_s = clock.now_s + training.uniform(0.95, 1.05)
            continue
        running = open_groups[:places]
        speed = min(1.0, rate / max(1, len(running)))
        ends_s = clock.now_s + min((left for left, _ in running), default=math.inf) / speed
        passed_s = min(ends_s, trained_s) - clock.now_s
        clock.now_s += passed_s
        running = [(left - speed * passed_s, admitted) for left, admitted in running]
        open_groups[:places] = running
        for group in [group for group in running if group[0] <= 1e-9]:
            open_groups.remove(group)
            finished.append(group[1])
            admission.note_end("rollout/0", GROUP_SIZE * max(0, len(open_groups) - places))
            admission.note_finished(len(finished))
        if clock.now_s >= trained_s:
            is_training, trained_s, version = False, math.inf, version + 1
            admission.note_asked(version)
    run.step, run.staleness = mean(steps[num_steps // 2 :]), mean(staleness[num_steps // 2 :])
    return run


@pytest.mark.parametrize(
    ("latency", "load", "most"), [(0.3, 0.3, 2.0), (0.3, 0.95, 2.5), (1.0, 0.8, 3.0)]
)
def test_where_generation_keeps_up_data_is_fresh_at_the_same_speed(
    latency: float, load: float, most: float
) -> None:
    just, eager = (simulated(mode, latency, load) for mode in AdmissionMode)
    assert eager.staleness > 7.5
    assert just.staleness < most
    assert just.step <= 1.02 * eager.step


def test_where_generation_is_the_slower_side_it_gets_all_that_the_bound_allows() -> None:
    eager, just = (
        simulated(mode, 1.0, 1.3) for mode in (AdmissionMode.eager, AdmissionMode.just_in_time)
    )
    assert just.leads[-1] > 7.5
    assert just.step <= 1.01 * eager.step


@pytest.mark.parametrize("load", [1.05, 1.3, 2.0])
def test_where_engines_are_full_nothing_waits_in_a_queue_for_long(load: float) -> None:
    places = math.ceil(BATCH * 0.2 * math.exp(0.9**2 / 2) / load)
    just, eager = (
        simulated(mode, 0.2, load, places=places)
        for mode in (AdmissionMode.just_in_time, AdmissionMode.eager)
    )
    assert eager.staleness > 7.5
    assert just.staleness < 2.5
    assert just.step <= 1.01 * eager.step


def test_the_autoscaler_hears_whether_workers_could_do_more() -> None:
    clock = Clock()
    admission = make(4, clock=clock)
    for _ in range(2):
        admission.note_asked(0)
        clock.now_s += 0.5
        admission.note_end("rollout/0", num_waiting=0)
        admission.note_end("rollout/1", num_waiting=3)
        clock.now_s += 0.5
        admission.note_end("rollout/0", num_waiting=2)
        admission.note_finished(BATCH)
        admission.note_batch(0)
    # one of the workers had free places for half of the step
    assert admission.free_share == pytest.approx(0.25)
    assert admission.spare_lead == pytest.approx((1 - admission.lead / 4) * 0.25)


def test_it_follows_lengths_that_double() -> None:
    run = simulated(AdmissionMode.just_in_time, 1.0, 0.4, doubles_at=40)
    before, soon, after = mean(run.leads[30:40]), mean(run.leads[50:60]), mean(run.leads[60:])
    assert after > before + 1
    assert soon == pytest.approx(after, abs=0.5)
