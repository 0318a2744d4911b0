"""Checks of what a reward, or a reward of a group, has given. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

from areal_sc.errors import RewardError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import Score
from areal_sc.rewards.process import finite_reward


def is_finite(value: Any) -> bool:
    """Whether it is a number, and neither NaN nor infinite."""
    try:
        return math.isfinite(value)
    except (TypeError, OverflowError):
        return False


def problem_of_numbers(what: str, numbers: Any) -> str:
    """Why numbers by name cannot be used; "" if they can.

    Args:
        what: one of them is called, such as `metric`.
    """
    if not isinstance(numbers, Mapping):
        return f"expected each {what} by its name, got {type(numbers).__name__}"
    for name, value in numbers.items():
        if type(name) is not str or not name.isprintable():
            return f"the name of a {what} must be printable text, got {name!r}"
        if not is_finite(value):
            return f"{what} {name!r} must be finite, got {value!r}"
    return ""


def finite_score(value: Any) -> Score:
    """`value` as a `Score`; one that is given stays as it is.

    Raises: RewardError: it is no finite number, or a part, a weight or the shaping of a `Score` is
        none.
    """
    number = finite_reward(value)
    if not isinstance(value, Score):
        return Score(number)
    problem = problem_of_numbers("part", value.parts) or problem_of_numbers("weight", value.weights)
    if not is_finite(value.shaping):
        problem = problem or f"the shaping must be finite, got {value.shaping!r}"
    if problem:
        raise RewardError(f"the Score: {problem}", kind=RejectionKind.bad_reward)
    return value


def scores_of_group(given: Any, num_episodes: int) -> list[Score]:
    """What a reward of a group gave, one an episode.

    Raises: RewardError: it has no order, or is not as many finite numbers as there are episodes.
    """
    if not hasattr(given, "__len__") or isinstance(given, str | bytes | Mapping | Set):
        found = type(given).__name__
    elif len(given) != num_episodes:
        found = f"{len(given)} numbers"
    else:
        return [finite_score(it) for it in given]
    raise RewardError(
        f"it gave {found}, expected a list of {num_episodes} numbers, one an episode",
        kind=RejectionKind.bad_reward,
    )
