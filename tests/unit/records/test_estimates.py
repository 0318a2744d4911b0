from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.records.estimates import (
    accuracy,
    accuracy_interval,
    majority,
    mean_of,
    paired_difference,
    pass_at_k,
)

Draw = Callable[[random.Random], float]
"""How likely the answers to a prompt that was drawn are right."""

SPREADS: dict[str, Draw] = {
    "all prompts alike": lambda rng: 0.3,
    "easy or impossible": lambda rng: float(rng.random() < 0.3),
    "of all kinds": lambda rng: rng.betavariate(0.6, 1.4),
    "hardly any": lambda rng: rng.betavariate(0.2, 1.8),
}


@pytest.mark.parametrize("num_samples", [1, 8])
@pytest.mark.parametrize("kind", SPREADS)
def test_the_interval_holds_the_true_accuracy_as_often_as_it_says(
    kind: str, num_samples: int
) -> None:
    """2,000 simulated sets: the share has a standard error of half a percent."""
    rng, num_sets, num_held = random.Random(kind), 2000, 0
    true = 0.1 if kind == "hardly any" else 0.3
    for _ in range(num_sets):
        chances = [SPREADS[kind](rng) for _ in range(100)]
        answers = [[float(rng.random() < it) for _ in range(num_samples)] for it in chances]
        low, high = accuracy_interval(answers)
        num_held += low <= true <= high
    assert 0.92 <= num_held / num_sets <= 0.98


def test_one_answer_a_prompt_has_wilsons_interval() -> None:
    """Newcombe, "Two-sided confidence intervals", Statistics in Medicine 17 (1998), table I."""
    for right, count, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605)]:
        answers = [[float(it < right)] for it in range(count)]
        assert accuracy_interval(answers) == pytest.approx((low, high), abs=5e-5)
    for right, count, low, high in [(0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)]:
        answers = [[float(it < right)] for it in range(count)]
        assert accuracy_interval(answers) == pytest.approx((low, high), abs=5e-5)


def test_more_answers_to_the_same_prompts_say_little_where_prompts_differ() -> None:
    few = [[1.0]] * 10 + [[0.0]] * 10
    assert accuracy_interval([answers * 50 for answers in few]) == accuracy_interval(few)
    alike = [[1.0, 0.0] * 25] * 20
    low, high = accuracy_interval(alike)
    assert high - low < 0.07


@pytest.mark.parametrize("right", [[], [[]], [[1.0], [1.0, 0.0]]])
def test_there_is_no_interval_of_uneven_answers(right: list[list[float]]) -> None:
    with pytest.raises(ValueError, match="equally many answers"):
        accuracy_interval(right)


@given(
    st.integers(1, 7).flatmap(
        lambda count: st.tuples(
            st.lists(
                st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=count, max_size=count),
                min_size=1,
                max_size=4,
            ),
            st.integers(1, count),
        )
    )
)
def test_pass_at_k_is_the_mean_over_all_choices_of_k_answers(
    given_answers: tuple[list[list[float]], int],
) -> None:
    right, k = given_answers
    shares = []
    for answers in right:
        chosen = [any(it >= 1 for it in some) for some in itertools.combinations(answers, k)]
        shares.append(sum(chosen) / len(chosen))
    assert pass_at_k(right, k) == pytest.approx(sum(shares) / len(shares), abs=1e-12)


def test_pass_at_k_of_many_answers_is_exact() -> None:
    assert pass_at_k([[1.0] * 3 + [0.0] * 997], 500) == pytest.approx(
        1 - 500 * 499 * 498 / (1000 * 999 * 998), rel=1e-12
    )


@pytest.mark.parametrize(
    ("right", "k"), [([], 1), ([[1.0]], 2), ([[1.0]], 0), ([[1.0, 1.0], [1.0]], 2)]
)
def test_k_is_at_most_the_number_of_answers(right: list[list[float]], k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}"):
        pass_at_k(right, k)


def answers_of(rng: random.Random, chances: list[float], num_samples: int) -> list[list[float]]:
    return [[float(rng.random() < it) for _ in range(num_samples)] for it in chances]


def skewed(rng: random.Random, mean: float) -> float:
    """Most prompts are nearly always right, or nearly never, as with a model on a benchmark."""
    return rng.betavariate(0.5 * mean, 0.5 * (1 - mean))


@pytest.mark.parametrize("num_samples", [1, 4, 16])
@pytest.mark.parametrize("true", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_intervals_of_prompts_of_all_kinds(true: float, num_samples: int) -> None:
    rng, num_sets = random.Random(7), 1000
    num_held = 0
    for _ in range(num_sets):
        chances = [skewed(rng, true) for _ in range(100)]
        low, high = accuracy_interval(answers_of(rng, chances, num_samples))
        num_held += low <= true <= high
    assert 0.92 <= num_held / num_sets <= 0.98


@pytest.mark.parametrize(("before", "gain"), [(0.1, 0.05), (0.5, 0.0), (0.8, 0.1)])
def test_a_difference_of_two_models_on_the_same_prompts(before: float, gain: float) -> None:
    """Prompts that are hard for one are so for the other."""
    rng, num_sets, num_samples = random.Random(3), 1000, 4
    share = gain / (1 - before)  # of what was missing
    num_held, widths = 0, list[tuple[float, float]]()
    for _ in range(num_sets):
        chances = [skewed(rng, before) for _ in range(100)]
        first = answers_of(rng, chances, num_samples)
        second = answers_of(rng, [it + share * (1 - it) for it in chances], num_samples)
        found = paired_difference(first, second)
        num_held += found.low <= gain <= found.high
        assert found.low <= found.value <= found.high
        apart = [accuracy(first), accuracy(second)]
        widths.append((found.high - found.low, sum(it.high - it.low for it in apart)))
    assert 0.92 <= num_held / num_sets <= 0.98
    assert sum(it for it, _ in widths) < 0.5 * sum(it for _, it in widths), "pairs are surer"


def test_the_mean_of_sets_holds_the_mean_of_their_accuracies() -> None:
    """Sets of different sizes, of which each counts alike."""
    rng, num_sets, num_held = random.Random(5), 1000, 0
    kinds = [(0.1, 100), (0.5, 30), (0.9, 200)]
    for _ in range(num_sets):
        estimates = [
            accuracy(answers_of(rng, [skewed(rng, true) for _ in range(count)], 4))
            for true, count in kinds
        ]
        found = mean_of(estimates)
        num_held += found.low <= 0.5 <= found.high
    assert 0.92 <= num_held / num_sets <= 0.98
    assert mean_of(estimates[:1]).value == estimates[0].value


def test_pairs_have_to_be_pairs() -> None:
    with pytest.raises(ValueError, match="same prompts of both models, got 1 and 2"):
        paired_difference([[1.0]], [[1.0], [0.0]])
    with pytest.raises(ValueError, match="at least one estimate"):
        mean_of([])
    same = [[1.0], [0.0], [1.0]]
    assert paired_difference(same, same).value == 0.0


def test_the_most_frequent_answer_decides() -> None:
    right = [[1.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    given = [["7", "7", "8"], ["1", "1", "2"], ["3", "4", None], [None, None, None]]
    assert majority(given, right) == (1 + 0 + 0.5 + 0) / 4
    with pytest.raises(ValueError, match="a vote, or None, for each"):
        majority([["7"]], [[1.0, 0.0]])
