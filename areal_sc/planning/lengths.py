"""How long answers are: what the longest of each group and the mean of all tell of their spread."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

NUM_QUANTILES: Final = 32
NUM_HALVINGS: Final = 17
MAX_SIGMA: Final = 3.0

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """Tokens of answers: min(exp(location + of_group * g + of_answer * a), most).

    g is a standard normal number of the group, and a one of the answer: answers to one prompt are
    more alike than those to several.
    """

    location: float
    of_group: float
    of_answer: float
    most: float

    def draw(self, rng: random.Random, group_size: int) -> list[float]:
        """Draws the lengths of the answers of one group."""
        middle = self.location + self.of_group * rng.gauss(0.0, 1.0)
        tokens = (middle + self.of_answer * rng.gauss(0.0, 1.0) for _ in range(group_size))
        return [min(math.exp(min(x, 700.0)), self.most) for x in tokens]


@cache  # forecasts of one run have the same figures
def fit_lengths(
    mean: float, longest: float, longest_std: float, most: float, group_size: int
) -> Lengths:
    """The lengths that have these figures, or come as near as such lengths can.

    Args:
        mean: tokens of an answer.
        longest, longest_std: of a group's longest answer, mean and standard deviation over groups.
        most: the limit of an answer.
    """
    shares = (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES
    normal = _quantiles(shares)
    highest = _quantiles(shares ** (1 / group_size))  # of as many normal numbers

    def tokens(location: float, of_group: float, of_answer: float, of: Floats) -> Floats:
        logs = location + of_group * normal[:, None] + of_answer * of
        return np.minimum(np.exp(np.minimum(logs, 700.0)), most)

    def location_of(of_group: float, of_answer: float) -> float:
        high = math.log(most) + 3 * (of_group + of_answer)
        low = -3 * (of_group + of_answer)
        return _bisected(
            lambda x: float(tokens(x, of_group, of_answer, highest).mean()) - longest, low, high
        )

    def of_answer_of(of_group: float) -> float:
        if group_size == 1:
            return 0.0  # what is due to which cannot be told, nor does it matter

        def rising(sigma: float) -> float:
            location = location_of(of_group, sigma)
            return mean - float(tokens(location, of_group, sigma, normal).mean())

        return _bisected(rising, 0.0, MAX_SIGMA)

    def std_of(of_group: float) -> float:
        of_answer = of_answer_of(of_group)
        return float(tokens(location_of(of_group, of_answer), of_group, of_answer, highest).std())

    of_group = _bisected(lambda sigma: std_of(sigma) - longest_std, 0.0, MAX_SIGMA)
    of_answer = of_answer_of(of_group)
    return Lengths(location_of(of_group, of_answer), of_group, of_answer, most)


def _quantiles(shares: Floats) -> Floats:
    normal = NormalDist()
    return np.array([normal.inv_cdf(float(share)) for share in shares])


def _bisected(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where it is 0, or the end that is nearer to that."""
    for _ in range(NUM_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return (low + high) / 2
