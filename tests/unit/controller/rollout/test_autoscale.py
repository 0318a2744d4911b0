"""The number of workers that is found by trying, against a model of a trainer and its workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_sc.config.parallel_settings import AutoscaleConfig
from areal_sc.controller.rollout.autoscale import (
    FIRST_PATIENCE,
    SETTLE_STEPS,
    URGENT_STEPS,
    Autoscaler,
    SeenStep,
    SizeChange,
)

FIRST_CHANGE = SETTLE_STEPS + URGENT_STEPS
"""Steps until a run with far too few workers gets more."""


def played(
    needed: Callable[[int], float],
    num_workers: int,
    num_steps: int,
    noise: float = 0.0,
    limits: tuple[int, int] = (1, 16),
) -> tuple[int, list[tuple[int, SizeChange]]]:
    """The last number of workers, and all changes with their steps.

    Args:
        needed: step -> workers, a broken number, by which training and generation are equally fast.
        noise: of the slack, in steps.
    """
    rng, autoscaler = random.Random(0), Autoscaler(AutoscaleConfig(*limits))
    changes = []
    for step in range(num_steps):
        spare = num_workers / needed(step) - 1
        slack = min(0.3, spare) + noise * rng.uniform(-1, 1)
        lead = 4.0 if spare <= 0 else max(0.0, 2.0 - spare)
        change = autoscaler.note_step(SeenStep(num_workers, slack, 1 - lead / 4, is_steady=True))
        if change is not None:
            changes.append((step, change))
            num_workers = change.num_workers
    return num_workers, changes


@pytest.mark.parametrize("first", [1, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_least_number_that_does_not_hold_up_the_trainer_is_found(
    first: int, noise: float
) -> None:
    number, changes = played(lambda step: 3.7, first, 400, noise)
    assert number == 4
    late = [change for step, change in changes if step > 250]
    assert len(late) <= 4, "it flaps"


def test_one_less_is_tried_again_after_a_pause_that_doubles() -> None:
    _, changes = played(lambda step: 3.7, 4, 2000)
    trials = [step for step, change in changes if change.num_workers == 3]
    pauses = [after - before for before, after in itertools.pairwise(trials)]
    assert pauses[0] >= FIRST_PATIENCE
    assert all(after > 1.7 * before for before, after in itertools.pairwise(pauses))
    assert {change.num_workers for _, change in changes} == {3, 4}


def test_it_follows_when_answers_get_longer_in_the_middle() -> None:
    number, changes = played(lambda step: 1.8 if step < 60 else 5.5, 2, 120)
    assert number == 6
    assert not [change for step, change in changes if step < 60 and change.num_workers > 2]


def test_a_run_with_far_too_few_workers_gets_all_that_it_needs() -> None:
    """With one it waits 95 % of its time, and with two still 90 %: that has helped."""
    number, changes = played(lambda step: 20.0, 1, 100, limits=(1, 32))
    assert number == 20
    assert [change.num_workers for _, change in changes] == [2, 4, 8, 16, 20]


def test_more_workers_that_do_not_help_are_given_back() -> None:
    """The longest answer takes longer than a step: the number of workers changes nothing."""
    autoscaler, number, most = Autoscaler(AutoscaleConfig(1, 16)), 2, 2
    for _ in range(60):
        change = autoscaler.note_step(SeenStep(number, -0.4, 0.0, is_steady=True))
        if change is not None:
            number = change.num_workers
            most = max(most, number)
    assert (number, most) == (2, 4)


def test_where_more_workers_help_little_those_between_are_not_tried_one_by_one() -> None:
    """Without staleness the trainer always waits: 10 s, and 1 s by the number of workers."""
    autoscaler, number, changes = Autoscaler(AutoscaleConfig(1, 64)), 8, list[int]()
    for _ in range(FIRST_CHANGE + FIRST_PATIENCE):
        waited_s = 10 + 1 / number
        slack = -waited_s / (waited_s + 1)
        change = autoscaler.note_step(SeenStep(number, slack, 0.0, is_steady=True))
        if change is not None:
            number = change.num_workers
            changes.append(number)
    assert changes == [16, 8]


def test_nothing_is_concluded_from_steps_in_which_workers_were_missing() -> None:
    autoscaler = Autoscaler(AutoscaleConfig(1, 16))
    for step in range(200):
        seen = SeenStep(2, -0.5, 0.0, is_steady=step % FIRST_CHANGE != 0)
        assert autoscaler.note_step(seen) is None


def test_while_admission_can_hurry_no_worker_is_added() -> None:
    autoscaler = Autoscaler(AutoscaleConfig(1, 16))
    for _ in range(200):
        assert autoscaler.note_step(SeenStep(2, -0.5, 1.0, is_steady=True)) is None


def test_a_number_that_cannot_be_is_not_asked_for_again() -> None:
    autoscaler, asked = Autoscaler(AutoscaleConfig(1, 16)), []
    for _ in range(300):
        if change := autoscaler.note_step(SeenStep(1, -0.4, 0.0, is_steady=True)):
            asked.append(change.num_workers)
            autoscaler.refuse(change.num_workers)
    assert asked == [2]


@settings(max_examples=60, deadline=None)
@given(st.floats(0.3, 20.0), st.integers(1, 12), st.floats(0.0, 0.3), st.integers(1, 4), st.data())
def test_it_stays_within_its_limits(
    needed: float, first: int, noise: float, low: int, data: st.DataObject
) -> None:
    high = data.draw(st.integers(low, 12))
    first = min(max(first, low), high)
    _, changes = played(lambda step: needed, first, 300, noise, (low, high))
    assert all(low <= change.num_workers <= high for _, change in changes)
    steps = [step for step, _ in changes]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert min(gaps, default=FIRST_CHANGE) >= FIRST_CHANGE
