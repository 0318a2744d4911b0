"""Several reward functions as one reward. No torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, cast

from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import RUN_CODE, Reward, RewardFunction, is_async, runs_code

_EXPECTED = (
    "a function, or several by name, each alone or with its weight: "
    '{"right": right, "length": (length, -0.01)}'
)


def weighted_functions(reward: Reward) -> dict[str, tuple[RewardFunction, float]]:
    """Each of several functions with its weight, by name; empty for one function alone.

    Raises: WorkflowError: it is neither, a name is none for a metric, or a weight is not finite, or
        all are 0.
    """
    if not isinstance(reward, Mapping):
        if not callable(reward):
            raise WorkflowError(f"reward: expected {_EXPECTED}; got {reward!r:.200}")
        return {}
    if not reward:
        raise WorkflowError(f"reward: expected {_EXPECTED}; got an empty mapping")
    found = {}
    for name, value in reward.items():
        if not (isinstance(name, str) and name.isascii() and name.isidentifier()):
            raise WorkflowError(
                f"reward {name!r}: expected a name of ASCII letters, digits and `_` that does not "
                "begin with a digit: a metric will have it"
            )
        match value:
            case (function, int() | float() as weight) if callable(function):
                found[name] = function, float(weight)
            case function if callable(function):
                found[name] = function, 1.0
            case _:
                raise WorkflowError(
                    f"reward {name!r}: expected a function, or a function and its weight, got "
                    f"{value!r:.200}"
                )
        if not math.isfinite(found[name][1]):
            raise WorkflowError(f"reward {name!r}: expected a finite weight, got {found[name][1]}")
    if not any(weight for _, weight in found.values()):
        raise WorkflowError("reward: all weights are 0, so all rewards would be: expected another")
    return found


def check_row(reward: Reward, row: Mapping[str, Any]) -> None:
    """Asks each function that has a `check_row` of its own what it says of a row.

    Raises: WorkflowError: one cannot score answers to it.
    """
    functions: list[Any] = [function for function, _ in weighted_functions(reward).values()]
    for function in functions or [reward]:
        if check := getattr(function, "check_row", None):
            check(row)


def check_signatures(reward: Reward) -> None:
    """Raises: WorkflowError: a function cannot be called with a prompt and a completion."""
    functions = weighted_functions(reward)
    for name, (function, _) in functions.items():
        _check_signature(function, f"reward {name!r}")
    if not functions:
        _check_signature(cast("RewardFunction", reward), "reward")


def _check_signature(function: RewardFunction, where: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of a builtin, which does not tell
        return
    runs = runs_code(function)
    if runs and not is_async(function):
        raise WorkflowError(
            f"{where}: a function with a parameter {RUN_CODE!r} has to be `async def`, because the "
            "sandbox is the worker's"
        )
    try:
        signature.bind({}, "", **({RUN_CODE: None} if runs else {}))
    except TypeError as error:
        name: Any = getattr(function, "__name__", type(function).__name__)
        raise WorkflowError(
            f"{where}: expected a function of a prompt (a dict) and a completion (a text), got "
            f"{name}{signature}: {error}"
        ) from None
