from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.trainer.learning_health import NUM_STEPS, LearningHealth

Course = Callable[[float, random.Random], dict[str, Any]]
"""What a step reports, by the share of the run that is done."""


def step(
    number: int,
    *,
    reward: float,
    accuracy: float | None = None,
    signal: float = 0.6,
    entropy: float = 1.0,
    kl: float = 0.01,
    stopped: float = 1.0,
    skipped: float = 0.0,
) -> StepMetrics:
    means = {"stopped": stopped} if accuracy is None else {"stopped": stopped, "accuracy": accuracy}
    return StepMetrics(
        step=number,
        reward=reward,
        group_staleness_mean=0.0,
        group_staleness_max=0,
        token_staleness_mean=0.0,
        token_staleness_max=0,
        num_rows=64,
        num_generated_tokens=640,
        num_trained_tokens=640,
        step_time_s=1.0,
        wait_s=0.1,
        train_s=0.8,
        sync_s=0.1,
        signal_share=signal,
        train={
            "entropy": entropy,
            "proximal_kl": kl,
            "num_updates": 4 - skipped,
            "num_skipped_updates": skipped,
        },
        workflow=means,
    )


def follow(course: Course, num_steps: int, seed: int = 0) -> tuple[LearningHealth, dict[int, str]]:
    """The run's health at its end, and what was told after which step."""
    health, rng, told = LearningHealth(), random.Random(seed), dict[int, str]()
    for number in range(num_steps):
        health.on_step(step(number + 1, **course(number / num_steps, rng)))
        for text in health.take_untold():
            assert number + 1 not in told
            told[number + 1] = text
    return health, told


def learns(share: float, rng: random.Random) -> dict[str, Any]:
    """As letter-sort does: what is solved has neither entropy nor signal."""
    accuracy = min(1.0, max(0.0, 0.1 + 1.2 * share + rng.gauss(0, 0.05)))
    left = max(0.0, 1 - 1.1 * share)
    return {
        "reward": accuracy,
        "accuracy": accuracy,
        "signal": 0.8 * left,
        "entropy": 2 * left**2 + 0.01,
    }


def pays_little(share: float, rng: random.Random) -> dict[str, Any]:
    """One answer of a hundred is right, and steps are small."""
    accuracy = sum(rng.random() < 0.02 for _ in range(16)) / 16
    return {"reward": accuracy, "accuracy": accuracy, "signal": 0.3}


def without_accuracy(share: float, rng: random.Random) -> dict[str, Any]:
    known = learns(share, rng)
    return known | {"reward": 10 * known["reward"] - 5, "accuracy": None}


def noisy(share: float, rng: random.Random) -> dict[str, Any]:
    accuracy = min(1.0, max(0.0, rng.gauss(0.5, 0.25)))
    return {"reward": accuracy, "accuracy": accuracy}


def without_reward(share: float, rng: random.Random) -> dict[str, Any]:
    """As supervised fine-tuning tells its steps."""
    return {"reward": math.nan}


@pytest.mark.parametrize("course", [learns, pays_little, without_accuracy, noisy, without_reward])
def test_a_run_that_learns_hears_nothing(course: Course) -> None:
    for seed in range(20):
        health, told = follow(course, 150, seed)
        assert told == {}
        assert health.complaints == {}


def always_zero(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.0, "accuracy": 0.0, "signal": 0.0}


def stuck_at_format(share: float, rng: random.Random) -> dict[str, Any]:
    paid = min(0.2, 0.02 + share)
    return {"reward": paid, "accuracy": 0.0, "signal": 0.5 if paid < 0.2 else 0.01}


def collapses(share: float, rng: random.Random) -> dict[str, Any]:
    accuracy = 0.5 if share < 0.4 else 0.05
    return {"reward": accuracy + rng.gauss(0, 0.01), "accuracy": accuracy, "signal": 0.4}


def falls_from_zero(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": (-0.1 if share < 0.4 else -0.9) + rng.gauss(0, 0.01)}


def narrows(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.3, "accuracy": 0.3, "entropy": 2.0 if share < 0.3 else 0.01}


def narrows_with_gaps(share: float, rng: random.Random) -> dict[str, Any]:
    """Of some steps no token has a gradient."""
    return narrows(share, rng) | ({"entropy": math.nan} if rng.random() < 0.3 else {})


def leaps(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.3, "kl": 0.01 if share < 0.3 else 3.0}


def overflows(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.3, "skipped": 0.0 if share < 0.3 else 3.0}


def never_ends(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.3 + share, "stopped": 0.9 if share < 0.3 else 0.1}


@pytest.mark.parametrize(
    ("course", "rule", "text"),
    [
        (always_zero, "no signal", "every answer of the last 10 steps has the reward 0;"),
        (stuck_at_format, "no signal", "of the prompts had answers of different rewards"),
        (collapses, "fallen reward", "the reward has fallen to"),
        (falls_from_zero, "fallen reward", "from -0."),
        (narrows, "no entropy", "its entropy is 0.01, and was 2 at first"),
        (narrows_with_gaps, "no entropy", "its entropy is 0.01, and was 2 at first"),
        (leaps, "wide steps", "moves the policy by"),
        (overflows, "skipped updates", " were skipped and "),
        (never_ends, "endless answers", "of the answers end by themselves, and 90% did at first"),
    ],
)
def test_what_is_wrong_is_named_once_and_soon(course: Course, rule: str, text: str) -> None:
    health, told = follow(course, 60)
    assert list(health.complaints) == [rule]
    (said,) = told.values()
    assert text in said
    assert min(told) <= 40
    assert said.rpartition(": ")[2] or said.rpartition("; ")[2], "it says what to change"


def test_a_policy_that_its_first_steps_ruin_is_not_laid_upon_the_reward() -> None:
    """Rows without signal have no tokens of which a divergence could be measured."""

    def ruined(share: float, rng: random.Random) -> dict[str, Any]:
        if share < 0.05:
            return {"reward": 0.08, "accuracy": 0.08, "kl": 14.0}
        return {"reward": 0.0, "accuracy": 0.0, "signal": 0.0, "kl": math.nan}

    health, told = follow(ruined, 40)
    assert list(told) == [10, 11]
    assert "moves the policy by 14 nats" in told[10]
    assert health.complaints["no signal"].endswith("with a smaller actor.optimizer.lr")


def test_what_is_over_is_not_said_at_the_end_and_is_told_anew() -> None:
    health = LearningHealth()
    stages: list[tuple[float, bool]] = [(0.01, False), (3.0, True), (0.01, False), (3.0, True)]
    for kl, is_wrong in stages:
        for number in range(3 * NUM_STEPS):
            health.on_step(step(number, reward=0.3, kl=kl))
        assert bool(health.take_untold()) == bool(health.complaints) == is_wrong


def evaluated(health: LearningHealth, scores: Iterable[float], name: str = "periodic") -> None:
    for number, score in enumerate(scores):
        health.on_step(step(10 * number, reward=0.1 * number, accuracy=0.1))
        health.on_evaluation(
            EvaluationResult(
                name=name,
                step=10 * number,
                reward=score,
                num_prompts=100,
                version_min=0,
                version_max=0,
                temperature=0.0 if name == "greedy" else 1.0,
            )
        )
    for number in range(NUM_STEPS):
        health.on_step(step(100 + number, reward=1 + 0.1 * number, accuracy=0.1))


@pytest.mark.parametrize(
    ("scores", "name", "is_wrong"),
    [
        ([0.2, 0.5, 0.4, 0.38], "periodic", True),
        ([0.2, 0.5, 0.4, 0.38], "hard/periodic", True),
        ([0.2, 0.5, 0.4, 0.49], "periodic", False),
        ([0.2, 0.5, 0.4, 0.38], "greedy", False),
        ([0.5, 0.4], "periodic", False),
    ],
)
def test_evaluations_that_fall_while_training_rises(
    scores: list[float], name: str, is_wrong: bool
) -> None:
    health = LearningHealth()
    evaluated(health, scores, name)
    assert ("falling evaluation" in health.complaints) == is_wrong


@pytest.mark.parametrize(
    ("dtype", "noise", "mismatch", "is_wrong"),
    [
        (Dtype.float32, 5e-6, 1e-4, False),
        (Dtype.float32, 5e-6, 0.02, True),
        (Dtype.float32, 2e-7, 0.001, True),
        (Dtype.bfloat16, 0.17, 0.05, False),  # a pretrained model of 30 layers
        (Dtype.bfloat16, 0.17, 0.5, True),
        (Dtype.bfloat16, 0.006, 0.05, True),  # one of two layers
    ],
)
def test_a_trainer_and_a_generator_that_disagree(
    dtype: Dtype, noise: float, mismatch: float, is_wrong: bool
) -> None:
    """In those of the steps that have tokens of their own weights; by the noise of the model."""
    health, rng = LearningHealth(dtype), random.Random(0)
    for number in range(2 * NUM_STEPS):
        metrics = step(number, **learns(number / 40, rng))
        if number % 3 == 0:
            worst = {"max": 9.0, "token": 151643.0}
            worst |= {"sampler_logprob": -0.25, "trainer_logprob": -9.25}
            found = {f"mismatch_{name}": value for name, value in worst.items()}
            metrics.train.update(found, mismatch=mismatch, mismatch_noise=noise)  # type: ignore[attr-defined]
        health.on_step(metrics)
    assert list(health.complaints) == (["disagreement"] if is_wrong else [])
    if is_wrong:
        told = health.complaints["disagreement"]
        assert f"differ by {mismatch:g} nats" in told
        assert "token 151643: -0.25 to the sampler, -9.25 to the trainer" in told


def test_a_resumed_run_knows_how_it_began() -> None:
    whole = [step(n, **collapses(n / 60, random.Random(n))) for n in range(60)]
    health = LearningHealth()
    health.remember(History(steps=whole[:20], evaluations=[]))
    for metrics in whole[20:]:
        health.on_step(metrics)
    assert list(health.complaints) == ["fallen reward"]


def test_records_of_an_earlier_start_may_lack_numbers() -> None:
    health = LearningHealth()
    for number in range(2 * NUM_STEPS):
        metrics = step(number, reward=0.1 * number)
        metrics.train["entropy"] = metrics.train["proximal_kl"] = None  # type: ignore[index]
        health.on_step(metrics)
    assert health.complaints == {}
