"""How sure an evaluation is: intervals of an accuracy, and pass@k. No torch.

Answers to one prompt are alike, so the prompts are what was drawn, not the answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

_QUANTILE: Final = 1.959964
"""95 % of a normal distribution lie within so many standard deviations of its mean."""


def accuracy_interval(right: Sequence[Sequence[float]]) -> tuple[float, float]:
    """The 95 % interval of an accuracy, over prompts of the kind that was drawn.

    It is Wilson's interval of so many independent answers as would have the standard error that
    the prompts' own means show (Korn and Graubard, "Confidence Intervals for Proportions With
    Small Expected Number of Positive Counts", Survey Methodology 24, 1998). With one answer a
    prompt it is Wilson's interval itself.

    Args:
        right: for each prompt, of each of its answers, how right it is, 0 to 1; equally many of
            each prompt.
    Returns: lower and upper bound.
    Raises: ValueError: there is no answer, or prompts have different numbers of them.
    """
    numbers = {len(answers) for answers in right}
    if len(numbers) != 1 or 0 in numbers:
        raise ValueError(f"expected equally many answers of each prompt, got {sorted(numbers)}")
    num_prompts = len(right)
    means = [sum(answers) / len(answers) for answers in right]
    mean = sum(means) / num_prompts
    spread = sum((value - mean) ** 2 for value in means)  # times 1 / n / (n - 1): its variance
    size = float(num_prompts)
    if 0 < mean < 1:
        # one answer a prompt gives the number of prompts; alike ones, that of all answers
        size = mean * (1 - mean) * num_prompts**2 / spread if spread else math.inf
    size = min(size, num_prompts * numbers.pop())
    shift = _QUANTILE**2 / size
    center = (mean + shift / 2) / (1 + shift)
    half = math.sqrt(shift * (mean * (1 - mean) + shift / 4)) / (1 + shift)
    return max(0.0, center - half), min(1.0, center + half)


def pass_at_k(right: Sequence[Sequence[float]], k: int) -> float:
    """The share of prompts of which at least one of k answers would be right.

    The mean over prompts of 1 - C(n - c, k) / C(n, k), with c of n answers right: unbiased.
    Source: Chen et al., arXiv:2107.03374, eq. 1.

    Args:
        right: as `accuracy_interval`; an answer of 1 or more is right.
        k: at most the number of a prompt's answers.
    Raises: ValueError: a prompt has fewer than `k` answers, or there is no prompt.
    """
    if k < 1 or not right or min(map(len, right)) < k:
        raise ValueError(f"k={k}: expected 1 to the number of answers that each prompt has")
    failures = [(len(answers), sum(it < 1 for it in answers)) for answers in right]
    missed = (math.comb(wrong, k) / math.comb(count, k) for count, wrong in failures)
    return 1 - sum(missed) / len(right)
