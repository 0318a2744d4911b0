"""The errors that rules go by, against the spread of simulated runs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from builders import make_evaluation, make_step

from areal_sc.trainer.learning_course import NUM_STEPS, Course

NUM_GROUPS, GROUP_SIZE = 16, 4


def follow(rng: np.random.Generator, num_steps: int, *, prompts_matter: bool) -> Course:
    """Steps whose answers are right by chance: by that of their prompt, or by the same one."""
    course = Course(1.0)
    for number in range(1, num_steps + 1):
        chances = rng.uniform(0, 1, (NUM_GROUPS, 1)) if prompts_matter else 0.5
        right = (rng.random((NUM_GROUPS, GROUP_SIZE)) < chances).astype(float)
        metrics = make_step(
            number,
            reward=float(right.mean()),
            num_rows=right.size,
            num_groups=NUM_GROUPS,
            reward_std=float(right.std()),
            reward_std_in_groups=float(right.var(1, ddof=1).mean() ** 0.5),
            workflow={"accuracy": float(right.mean())},
        )
        course.add_step(metrics)
    return course


def test_the_error_of_a_reward_is_the_spread_of_runs() -> None:
    """It is the larger one of two estimates, so somewhat above the truth, and not below it."""
    rng = np.random.default_rng(0)
    runs = [follow(rng, NUM_STEPS, prompts_matter=True) for _ in range(200)]
    spread = float(np.std([run.reward().value for run in runs]))
    told = float(np.mean([run.reward().error for run in runs]))
    assert 0.95 * spread < told < 1.5 * spread


@pytest.mark.parametrize(("prompts_matter", "share"), [(False, 0.0), (True, 1 / 3)])
def test_what_prompts_explain_of_the_rewards(prompts_matter: bool, share: float) -> None:
    """Chances that are uniform have a variance of 1/12, of the 1/4 of all answers."""
    rng = np.random.default_rng(1)
    runs = [follow(rng, 30, prompts_matter=prompts_matter) for _ in range(60)]
    found = [run.variance.prompts_share() for run in runs]
    assert np.mean([it.value for it in found]) == pytest.approx(share, abs=0.02)
    if not prompts_matter:
        spread = np.std([it.value for it in found])
        assert np.mean([it.error for it in found]) == pytest.approx(spread, rel=0.4)


@pytest.mark.parametrize("num_updates", [2, 4, 8])
def test_no_policy_gains_more_than_its_reach(num_updates: int) -> None:
    """One answer of two, whose probability equal moves of the policy raise from a half."""
    p, whole = 0.5, 0.01
    moves = [whole * n / num_updates for n in range(num_updates)]
    divergences = [-p * math.log(1 + d / p) - (1 - p) * math.log(1 - d / (1 - p)) for d in moves]
    course = Course(1.0)
    train = {"proximal_kl": sum(divergences) / num_updates, "num_updates": num_updates}
    course.add_step(make_step(1, num_rows=8, num_trained_tokens=8, train=train))
    std = math.sqrt(p * (1 - p))
    assert whole <= course.reach * std * 1.001
    assert course.reach * std == pytest.approx(whole, rel=0.05)


def test_one_update_a_step_does_not_tell_how_far_it_goes() -> None:
    course = Course(1.0)
    course.add_step(make_step(1, train={"proximal_kl": 1e-14, "num_updates": 1}))
    assert (course.reach, course.num_moves) == (0.0, 0)


@pytest.mark.parametrize(
    ("workflow", "scores", "errors"),
    [
        ({"accuracy": 0.0}, 0.0, math.sqrt(2 / 104 * 102 / 104 / 104)),
        ({"accuracy": 0.5}, 0.5, 0.5 / math.sqrt(104)),
        ({}, -7.0, 3.0 / math.sqrt(100)),  # by the rewards of training
    ],
)
def test_the_error_of_an_evaluation(
    workflow: dict[str, float], scores: float, errors: float
) -> None:
    course = Course(1.0)
    course.add_evaluation(
        make_evaluation("hard/before", reward=-7.0, num_prompts=100, workflow=workflow)
    )
    course.add_step(make_step(1, reward_std=3.0, reward_std_in_groups=3.0, num_groups=32))
    (found,) = course.evaluations()["hard"]
    assert found.score.value == scores
    assert found.score.error == pytest.approx(errors)


def test_an_evaluation_keeps_its_error_where_training_is_solved() -> None:
    course = Course(1.0)
    course.add_evaluation(make_evaluation("hard/before", reward=1.0, num_prompts=100, workflow={}))
    for step, std in enumerate((3.0, *[0.0] * 20), start=1):
        course.add_step(make_step(step, reward_std=std, reward_std_in_groups=std, num_groups=32))
    (found,) = course.evaluations()["hard"]
    assert found.score.error == pytest.approx(3.0 / math.sqrt(100))
