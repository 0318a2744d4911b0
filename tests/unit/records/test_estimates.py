from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.records.estimates import accuracy_interval, pass_at_k

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
