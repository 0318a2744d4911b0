from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from builders import make_evaluation, make_step

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.trainer.learning_course import NUM_STEPS, Course
from areal_sc.trainer.learning_rules import RULES, LearningHealth, falling_evaluation

NUM_GROUPS = 32
GROUP_SIZE = 8
NUM_ROWS = NUM_GROUPS * GROUP_SIZE
NUM_TOKENS = 10

Steps = Callable[[float, random.Random], dict[str, Any]]
"""What a step reports, by the share of the run that is done."""


def step(
    number: int,
    *,
    reward: float,
    accuracy: float | None = None,
    signal: float = 0.6,
    std: float | None = None,
    in_groups: float | None = None,
    stopped: float = 1.0,
    num_alone: int = 0,
    answer_tokens: int = NUM_TOKENS,
    **train: float | None,
) -> StepMetrics:
    """By default of rewards that are 0 or 1, which prompts explain a quarter of."""
    means = {"stopped": stopped} if accuracy is None else {"stopped": stopped, "accuracy": accuracy}
    if std is None:
        std = math.sqrt(max(0.0, reward * (1 - reward)))
    reported = {"entropy": 1.0, "proximal_kl": 0.001, "num_updates": 4.0, "lr": 1e-3}
    return make_step(
        number,
        reward=reward,
        num_rows=NUM_ROWS,
        num_generated_tokens=NUM_ROWS * answer_tokens,
        num_trained_tokens=NUM_ROWS * answer_tokens,
        signal_share=signal,
        num_groups=NUM_GROUPS,
        num_one_episode_groups=num_alone,
        reward_std=std,
        reward_std_in_groups=math.sqrt(0.75) * std if in_groups is None else in_groups,
        train=reported | train,
        workflow=means,
    )


def evaluation(number: int, score: float, num_prompts: int = 100) -> EvaluationResult:
    scores = {"reward": score, "accuracy": score}
    return make_evaluation("periodic", step=number, num_prompts=num_prompts, **scores)


def follow(
    course: Steps, num_steps: int = 60, seed: int = 0, held_out: Iterable[float] = ()
) -> tuple[LearningHealth, dict[int, str]]:
    """The run's health at its end, and what was told after which step.

    Args:
        held_out: accuracies of 100 prompts, before the first step and at equal distances.
    """
    health, rng, told = LearningHealth(), random.Random(seed), dict[int, str]()
    scores = list(held_out)
    every = num_steps // max(1, len(scores) - 1)
    for number in range(num_steps + 1):
        if number:
            health.on_step(step(number, **course(number / num_steps, rng)))
        if scores and number % every == 0:
            health.on_evaluation(evaluation(number, scores.pop(0)))
        for text in health.take_untold():
            assert number not in told, "one cause at a time"
            told[number] = text
    return health, told


def right(rng: random.Random, true: float) -> dict[str, Any]:
    """Reward and accuracy of a batch of which so much is right in truth."""
    share = min(1.0, max(0.0, rng.gauss(true, math.sqrt(true * (1 - true) / NUM_ROWS))))
    return {"reward": share, "accuracy": share}


def learns(share: float, rng: random.Random) -> dict[str, Any]:
    """As letter-sort does: what is solved has neither entropy nor signal."""
    left = max(0.0, 1 - 1.1 * share)
    measured = right(rng, min(1.0, 0.1 + 1.2 * share))
    return measured | {"signal": 0.8 * left, "entropy": 2 * left**2 + 0.01}


def pays_little(share: float, rng: random.Random) -> dict[str, Any]:
    """One answer of a hundred is right, and steps are small."""
    return right(rng, 0.02) | {"signal": 0.15}


def without_accuracy(share: float, rng: random.Random) -> dict[str, Any]:
    known = learns(share, rng)
    return known | {"reward": 10 * known["reward"] - 5, "accuracy": None, "std": 5.0}


def noisy(share: float, rng: random.Random) -> dict[str, Any]:
    accuracy = min(1.0, max(0.0, rng.gauss(0.5, 0.25)))
    return {"reward": accuracy, "accuracy": accuracy}


def without_reward(share: float, rng: random.Random) -> dict[str, Any]:
    """As supervised fine-tuning tells its steps."""
    return {"reward": math.nan, "std": math.nan}


def is_flat(share: float, rng: random.Random) -> dict[str, Any]:
    """It learns too slowly for anything to be seen, and some prompts are easier than others."""
    return right(rng, 0.3)


@pytest.mark.parametrize(
    "course", [learns, pays_little, without_accuracy, noisy, without_reward, is_flat]
)
def test_a_run_that_may_learn_hears_nothing(course: Steps) -> None:
    for seed in range(20):
        health, told = follow(course, 100, seed)
        assert told == {}
        assert health.complaints == {}


Made = Callable[[], LearningHealth]


def run(
    course: Steps, num_steps: int = 60, held_out: Iterable[float] = (), seed: int = 0
) -> Callable[[], LearningHealth]:
    return lambda: follow(course, num_steps, seed, held_out)[0]


def of(**constant: Any) -> Steps:
    """A step that always reports the same."""
    return lambda share, rng: constant


def first(share_of_run: float, before: dict[str, Any], after: dict[str, Any]) -> Steps:
    """Steps that report something else in the first part of the run."""
    return lambda share, rng: before if share <= share_of_run else after


def both(*courses: Steps) -> Steps:
    """What all of them report; later ones win."""

    def reported(share: float, rng: random.Random) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for course in courses:
            found |= course(share, rng)
        return found

    return reported


def rises(share: float, rng: random.Random) -> dict[str, Any]:
    return right(rng, 0.1 + 0.7 * share)


def rises_by_form(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.1 + 0.4 * share + rng.gauss(0, 0.02), "accuracy": 0.01, "signal": 1.0}


def falls(share: float, rng: random.Random) -> dict[str, Any]:
    return right(rng, 0.5 if share < 0.4 else 0.05)


def warms_up(share: float, rng: random.Random) -> dict[str, Any]:
    return right(rng, 0.1) | {"lr": 1e-6 * share, "proximal_kl": 1e-9 * share**2}


def is_chance(share: float, rng: random.Random) -> dict[str, Any]:
    measured = right(rng, 0.3)
    std = math.sqrt(measured["reward"] * (1 - measured["reward"]))
    return measured | {"std": std, "in_groups": std}


DEAD = {"signal": 0.0, "entropy": math.nan, "proximal_kl": math.nan}
SLOW = {"reward": 0.15, "accuracy": 0.15, "proximal_kl": 1e-9}
MIXED = {"reward": 0.5, "accuracy": 0.5, "signal": 0.03, "in_groups": 0.05}
SPARSE = {"reward": 0.02, "accuracy": 0.02, "signal": 0.12}
RUINED = {"reward": 0.26, "accuracy": 0.26, "in_groups": 0.0} | DEAD
CUT = {"stopped": 0.1}
BEGINS = {"reward": 0.15, "accuracy": 0.15, "signal": 0.8, "entropy": 2.5}

LOOKS: dict[str, tuple[Made, Made, Made]] = {
    "skipped updates": (
        run(of(reward=0.3, num_updates=1.0, num_skipped_updates=3.0)),
        run(of(reward=0.3, num_updates=3.0, num_skipped_updates=1.0)),
        run(first(0.05, {"reward": 0.3, "num_updates": 0.0, "num_skipped_updates": 4.0}, SPARSE)),
    ),
    "one answer a prompt": (
        run(both(rises, of(num_alone=NUM_GROUPS, signal=0.0, num_effective_tokens=0.0))),
        run(both(rises, of(num_alone=NUM_GROUPS, signal=0.0, num_effective_tokens=90.0))),
        run(both(rises, of(num_alone=3, num_effective_tokens=0.0))),
    ),
    "too small steps": (
        run(of(**SLOW)),
        run(warms_up),
        run(of(**SLOW | {"proximal_kl": 0.0, "num_updates": 1.0})),
    ),
    "too wide steps": (
        run(first(0.12, BEGINS | {"proximal_kl": 0.03}, RUINED)),
        run(first(0.12, BEGINS | {"proximal_kl": 0.03}, RUINED | {"reward": 1, "accuracy": 1})),
        run(both(rises, of(proximal_kl=0.03))),
    ),
    "cut answers": (
        run(both(pays_little, of(**CUT))),
        run(both(rises, of(**CUT))),
        run(both(is_flat, of(stopped=0.05))),  # more are right than end: cut ones are
    ),
    "endless answers": (
        run(both(rises, first(0.3, {"stopped": 0.9}, {"stopped": 0.1}))),
        run(both(rises, first(0.3, {"stopped": 0.9}, {"stopped": 0.5}))),
        run(both(rises, of(**CUT))),
    ),
    "constant reward": (
        run(of(reward=0.0, accuracy=0.0, **DEAD)),
        run(first(0.3, BEGINS, {"reward": 1.0, "accuracy": 1.0, **DEAD})),  # solved
        run(of(reward=0.0, accuracy=0.0, stopped=0.0, **DEAD)),  # all are cut
    ),
    "too easy": (
        run(of(reward=0.97, accuracy=0.97, signal=0.15)),
        run(first(0.3, BEGINS, {"reward": 0.97, "accuracy": 0.97, "signal": 0.1})),
        run(of(reward=0.9, accuracy=0.9, signal=0.4)),
    ),
    "stalled": (
        run(first(0.4, BEGINS, RUINED)),
        run(first(0.4, BEGINS, RUINED | {"reward": 0.95, "accuracy": 0.95})),
        run(first(0.4, BEGINS, RUINED | {"signal": 0.4})),
        run(first(0.7, BEGINS, RUINED)),  # so far it stands for fewer steps than it has learned
    ),
    "no signal": (
        run(of(**MIXED)),
        run(of(**MIXED | {"signal": 0.2})),
        run(of(**MIXED | {"reward": 0.95, "accuracy": 0.95}), 20),
    ),
    "falling evaluation": (
        run(is_flat, held_out=[0.3, 0.25, 0.05, 0.04]),
        run(is_flat, held_out=[0.3, 0.35, 0.25, 0.24]),
        run(falls, held_out=[0.5, 0.5, 0.05, 0.04]),
    ),
    "by heart": (
        run(rises, held_out=[0.1, 0.15, 0.12, 0.14]),
        run(rises, held_out=[0.1, 0.3, 0.5, 0.7]),
        run(rises, held_out=[0.02, 0.12, 0.24, 0.4]),  # harder ones
    ),
    "fallen reward": (
        run(falls),
        run(lambda share, rng: right(rng, 0.5 if share < 0.4 else 0.35)),
        run(noisy),
    ),
    "reward by chance": (run(is_chance), run(is_flat), run(is_chance, 29)),
}
"""Of each rule a run in which it must speak, and two that look alike in which it must not."""


def test_each_rule_has_runs_that_look_alike() -> None:
    assert set(LOOKS) == set(RULES) - {"disagreement"}, "which has a test of its own"


@pytest.mark.parametrize("rule", LOOKS)
def test_a_rule_tells_a_cause_from_what_looks_like_it(rule: str) -> None:
    speaks, *looks_alike = LOOKS[rule]
    assert list(speaks().complaints) == [rule]
    for health in looks_alike:
        assert rule not in health().complaints


def stuck_at_format(share: float, rng: random.Random) -> dict[str, Any]:
    paid = min(0.2, 0.02 + share)
    is_paid = paid == 0.2
    std = 0.002 if is_paid else 0.08
    return {"reward": paid, "accuracy": 0.0, "signal": 0.01 if is_paid else 0.5, "std": std}


def falls_from_zero(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": (-0.1 if share < 0.4 else -0.9) + rng.gauss(0, 0.01), "std": 0.1}


def narrows(share: float, rng: random.Random) -> dict[str, Any]:
    return {"reward": 0.3, "accuracy": 0.3, "entropy": 2.0 if share < 0.3 else 0.01}


def narrows_with_gaps(share: float, rng: random.Random) -> dict[str, Any]:
    """Of some steps no token has a gradient, and in the end of none."""
    gone = share > 0.6 or rng.random() < 0.3
    return narrows(share, rng) | ({"entropy": math.nan} if gone else {})


@pytest.mark.parametrize(
    ("course", "rule", "texts"),
    [
        (of(reward=0.0, accuracy=0.0, **DEAD), "constant reward", ("since the first step", "0,")),
        (of(reward=1.0, accuracy=1.0, **DEAD), "constant reward", ("1,", "with a wrong one")),
        (stuck_at_format, "constant reward", ("nearly every answer", "form of an answer")),
        (of(reward=0.0, accuracy=0.0, stopped=0.0, **DEAD), "cut answers", ("max_new_tokens",)),
        (falls, "fallen reward", ("the reward has fallen to", "from 0.5")),
        (falls_from_zero, "fallen reward", ("from -0.",)),
        (narrows, "stalled", ("the entropy is 0.01, and was 2 at first",)),
        (narrows_with_gaps, "stalled", ("the entropy is 0.01, and was 2 at first",)),
        (first(0.3, {"reward": 0.3}, {"reward": 0.3, "proximal_kl": 3.0}), "too wide steps", ()),
        (first(0.12, BEGINS | {"proximal_kl": 0.03}, RUINED), "too wide steps", ("optimizer.lr",)),
        (of(**SLOW), "too small steps", ("80 of them", "1e-09", "optimizer.lr (now 0.001)")),
        (is_chance, "reward by chance", ("looks like chance: it is 0.", "score one answer twice")),
    ],
)
def test_what_is_wrong_is_named_once_with_what_was_seen(
    course: Steps, rule: str, texts: tuple[str, ...]
) -> None:
    health, told = follow(course, 80)
    assert list(health.complaints) == [rule]
    assert len(told) == 1
    assert min(told) <= 45
    assert all(text in health.complaints[rule] for text in texts)


def test_a_policy_that_its_first_steps_ruin_is_not_laid_upon_the_reward() -> None:
    """Rows without signal have no tokens of which a divergence could be measured."""
    ruined = first(
        0.05,
        {"reward": 0.08, "accuracy": 0.08, "proximal_kl": 14.0},
        {"reward": 0.0, "accuracy": 0.0, **DEAD},
    )
    health, told = follow(ruined, 40)
    assert list(told) == [10]
    assert "moves the policy by 14 nats" in told[10]
    assert "begin anew" in health.complaints["too wide steps"]


def test_a_cause_that_shows_later_takes_the_place_of_what_follows_from_it() -> None:
    begun = {"reward": 0.5, "accuracy": 0.5, "in_groups": 0.0, "entropy": 2.0, "signal": 0.03}
    health, told = follow(first(0.5, begun, begun | {"proximal_kl": 3.0}), 60)
    assert [text.split(":")[0][:20] for text in told.values()] == [
        "in the last 10 steps",
        "a step moves the pol",
    ]
    assert list(health.complaints) == ["too wide steps"]


def test_what_followed_from_a_cause_is_not_told_once_both_are_over() -> None:
    health = LearningHealth()
    wide, well = MIXED | {"proximal_kl": 3.0}, MIXED | {"signal": 0.5}
    told = list[str]()
    for number, reported in enumerate([wide] * 20 + [MIXED] * 10 + [well] * 40):
        health.on_step(step(number, **reported))
        told += health.take_untold()
    assert len(told) == 1
    assert "a step moves the policy" in told[0]
    assert health.complaints == {}


def test_what_is_over_is_not_said_at_the_end_and_is_told_anew() -> None:
    health = LearningHealth()
    stages: list[tuple[float, bool]] = [(0.01, False), (3.0, True), (0.01, False), (3.0, True)]
    for kl, is_wrong in stages:
        for number in range(3 * NUM_STEPS):
            health.on_step(step(number, reward=0.3, proximal_kl=kl))
        assert bool(health.take_untold()) == bool(health.complaints) == is_wrong


def test_many_evaluations_that_only_waver_show_no_fall() -> None:
    """The best of twenty is far above the last two by its choice alone."""
    rng, num_told = random.Random(0), 0
    for _ in range(200):
        course = Course(max_mismatch=1.0)
        for number in range(1, NUM_STEPS + 1):
            course.add_step(step(number, **is_flat(0.0, rng)))
        told = False
        for number in range(20):
            right = sum(rng.random() < 0.5 for _ in range(100))
            course.add_evaluation(evaluation(NUM_STEPS + number, right / 100))
            told |= falling_evaluation(course) is not None
        num_told += told
    assert num_told <= 1


def test_a_fall_is_told_of_any_number_of_evaluations() -> None:
    rng, course = random.Random(0), Course(max_mismatch=1.0)
    for number in range(1, NUM_STEPS + 1):
        course.add_step(step(number, **is_flat(0.0, rng)))
    for number in range(40_000):
        course.add_evaluation(evaluation(NUM_STEPS + number, 0.5, num_prompts=1000))
    assert falling_evaluation(course) is None
    for _ in range(3):
        course.add_evaluation(evaluation(NUM_STEPS + 40_000, 0.1, num_prompts=1000))
    told = falling_evaluation(course)
    assert told is not None
    assert told.startswith("the last 2 evaluations gave 0.1 ± 0.007, after 0.5 ± 0.02, ")


@pytest.mark.parametrize("name", ["hard/periodic", "greedy"])
def test_each_set_of_held_out_prompts_is_judged_by_itself_and_greedy_answers_are_not(
    name: str,
) -> None:
    health, rng = LearningHealth(), random.Random(0)
    for number, score in enumerate([0.5, 0.5, 0.1, 0.1]):
        for further in range(NUM_STEPS):
            health.on_step(step(NUM_STEPS * number + further + 1, **is_flat(0.0, rng)))
        health.on_evaluation(
            make_evaluation(
                name,
                step=NUM_STEPS * number,
                reward=score,
                accuracy=None,
                num_prompts=100,
                temperature=0.0 if name == "greedy" else 1.0,
            )
        )
    if name == "greedy":
        assert health.complaints == {}
    else:
        assert "the last 2 evaluations of hard gave" in health.complaints["falling evaluation"]


def test_held_out_prompts_that_improve_are_not_called_learned_by_heart() -> None:
    """The true accuracy rises from 1 to 5 %, and 100 prompts of an evaluation show it with noise.

    The reward pays for more than being right, and rises.
    """
    for seed in range(40):
        rng = random.Random(seed)
        true = [0.01 + 0.04 * n / 5 for n in range(6)]
        scores = [sum(rng.random() < it for _ in range(100)) / 100 for it in true]
        _, told = follow(rises_by_form, 100, seed, scores)
        assert told == {}


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
    whole = [step(n, **falls(n / 60, random.Random(n))) for n in range(60)]
    health = LearningHealth()
    health.remember(History(steps=whole[:20], evaluations=[]))
    for metrics in whole[20:]:
        health.on_step(metrics)
    assert list(health.complaints) == ["fallen reward"]


def test_a_resumed_run_judges_each_evaluation_after_its_step() -> None:
    """Held-out prompts gain nothing while training rises: told by what it was at their time."""
    steps = [step(n, **rises(n / 60, random.Random(n))) for n in range(1, 61)]
    scores = {0: 0.1, 20: 0.15, 40: 0.12, 60: 0.14}
    evaluations = [evaluation(number, score) for number, score in scores.items()]
    live, resumed, twice = LearningHealth(), LearningHealth(), LearningHealth()
    live.on_evaluation(evaluations[0])
    for metrics in steps:
        live.on_step(metrics)
        for result in evaluations[1:]:
            if result.step == metrics.step:
                live.on_evaluation(result)
    resumed.remember(History(steps, evaluations))
    for num_steps, num_evaluations in ((30, 2), (60, 4), (60, 4)):
        twice.remember(History(steps[:num_steps], evaluations[:num_evaluations]))
    assert list(live.complaints) == ["by heart"]
    assert live.complaints == resumed.complaints == twice.complaints


def test_records_of_an_earlier_start_may_lack_numbers() -> None:
    health = LearningHealth()
    for number in range(2 * NUM_STEPS):
        metrics = step(number, reward=0.1 * number, entropy=None, proximal_kl=None, lr=None)
        health.on_step(metrics)
    assert health.complaints == {}
