"""How sure an evaluation is: intervals of accuracies and of their differences, pass@k. No torch.

Answers to one prompt are alike, so the prompts are what was drawn, not the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation
from typing import Final

_QUANTILE: Final = 1.959964
"""95 % of a normal distribution lie within so many standard deviations of its mean."""


Answers = Sequence[Sequence[float]]
"""For each prompt, of each of its answers, how right it is, 0 to 1; equally many of each prompt."""


@dataclass(frozen=True)
class Estimate:
    """A number, and bounds that hold the true one with 95 % confidence."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference(Estimate):
    """How much more accurate one model is than another, on so many prompts of both."""

    num_prompts: int


def accuracy_interval(right: Answers) -> tuple[float, float]:
    """The 95 % interval of an accuracy, over prompts of the kind that was drawn.

    It is Wilson's interval of so many independent answers as would have the standard error that
    the prompts' own means show (Korn and Graubard, "Confidence Intervals for Proportions With
    Small Expected Number of Positive Counts", Survey Methodology 24, 1998). With one answer a
    prompt it is Wilson's interval itself.

    Returns: lower and upper bound.
    Raises: ValueError: there is no answer, or prompts have different numbers of them.
    """
    means, num_answers = _prompt_means(right)
    num_prompts = len(means)
    mean = sum(means) / num_prompts
    spread = sum((value - mean) ** 2 for value in means)  # times 1 / n / (n - 1): its variance
    size = float(num_prompts)
    if 0 < mean < 1:
        # one answer a prompt gives the number of prompts; alike ones, that of all answers
        size = mean * (1 - mean) * num_prompts**2 / spread if spread else math.inf
    size = min(size, num_prompts * num_answers)
    shift = _QUANTILE**2 / size
    center = (mean + shift / 2) / (1 + shift)
    half = math.sqrt(shift * (mean * (1 - mean) + shift / 4)) / (1 + shift)
    return max(0.0, center - half), min(1.0, center + half)


def accuracy(right: Answers) -> Estimate:
    """The mean over prompts, with `accuracy_interval`. Raises: as that."""
    means, _ = _prompt_means(right)
    return Estimate(sum(means) / len(means), *accuracy_interval(right))


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent numbers, each of which counts alike: of several sets of prompts.

    The distances of the bounds add up as the roots of sums of squares, each side by itself.
    Source: Zou and Donner, "Construction of confidence limits about effect measures", Statistics
    in Medicine 27 (2008), eq. 3.

    Raises: ValueError: there is none.
    """
    if not estimates:
        raise ValueError("expected at least one estimate to take the mean of, got none")
    count = len(estimates)
    value = sum(it.value for it in estimates) / count
    below = math.sqrt(sum((it.value - it.low) ** 2 for it in estimates)) / count
    above = math.sqrt(sum((it.high - it.value) ** 2 for it in estimates)) / count
    return Estimate(value, value - below, value + above)


def paired_difference(first: Answers, second: Answers) -> Estimate:
    """How much more accurate the second of two models is on the same prompts.

    Prompts that are hard for one model are so for the other, which makes a difference surer than
    two accuracies are.
    Source: Newcombe, "Improved confidence intervals for the difference between binomial proportions
    based on paired data", Statistics in Medicine 17 (1998), method 10, with `accuracy_interval` in
    place of Wilson's, and the correlation of the prompts' means.

    Args:
        first, second: of the same prompts in the same order; each may have its own number of
            answers a prompt.
    Raises: ValueError: they have different numbers of prompts; or see `accuracy_interval`.
    """
    if len(first) != len(second):
        raise ValueError(
            f"expected the same prompts of both models, got {len(first)} and {len(second)}"
        )
    one, other = accuracy(first), accuracy(second)
    related = _correlation(_prompt_means(first)[0], _prompt_means(second)[0])

    def distance(a: float, b: float) -> float:
        return math.sqrt(max(0.0, a * a + b * b - 2 * related * a * b))

    value = other.value - one.value
    return Estimate(
        value,
        max(-1.0, value - distance(other.value - other.low, one.high - one.value)),
        min(1.0, value + distance(other.high - other.value, one.value - one.low)),
    )


def pass_at_k(right: Answers, k: int) -> float:
    """The share of prompts of which at least one of k answers would be right.

    The mean over prompts of 1 - C(n - c, k) / C(n, k), with c of n answers right: unbiased.
    Source: Chen et al., arXiv:2107.03374, eq. 1.

    Args:
        right: an answer of 1 or more is right.
        k: at most the number of a prompt's answers.
    Raises: ValueError: a prompt has fewer than `k` answers, or there is no prompt.
    """
    if k < 1 or not right or min(map(len, right)) < k:
        raise ValueError(f"k={k}: expected 1 to the number of answers that each prompt has")
    failures = [(len(answers), sum(it < 1 for it in answers)) for answers in right]
    missed = (math.comb(wrong, k) / math.comb(count, k) for count, wrong in failures)
    return 1 - sum(missed) / len(right)


def majority(given: Sequence[Sequence[str | None]], right: Answers) -> float:
    """How right the most frequent answer to each prompt is, in the mean over prompts.

    Of several that are equally frequent each counts alike. None is no answer, and has no vote; a
    prompt without a vote is wrong.

    Args:
        given: for each prompt, what each of its answers is.
    Raises: ValueError: there is no prompt, or numbers differ.
    """
    if not given or list(map(len, given)) != list(map(len, right)):
        raise ValueError("expected a vote, or None, for each of at least one answer")
    total = 0.0
    for votes, values in zip(given, right, strict=True):
        groups: dict[str, list[float]] = {}
        for vote, value in zip(votes, values, strict=True):
            if vote is not None:
                groups.setdefault(vote, []).append(value)
        most = max(map(len, groups.values()), default=0)
        means = [sum(group) / most for group in groups.values() if len(group) == most]
        total += sum(means) / len(means) if means else 0.0
    return total / len(given)


def _prompt_means(right: Answers) -> tuple[list[float], int]:
    """The mean of each prompt, and the number of its answers."""
    numbers = {len(answers) for answers in right}
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError(f"expected equally many answers of each prompt, got {sorted(numbers)}")
    return [sum(answers) / len(answers) for answers in right], numbers.pop()


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's; 0 where one of them is constant."""
    if min(first) == max(first) or min(second) == max(second):
        return 0.0
    return correlation(first, second)
