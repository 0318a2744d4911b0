"""What is known of a reward function without a call of it. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from areal_sc.rewards.base import RUN_CODE


def is_async(reward: Any) -> bool:
    """Whether it runs on the event loop."""
    return inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(
        getattr(type(reward), "__call__", None)  # noqa: B004  # the method, not callable()
    )


def runs_code(reward: Any) -> bool:
    """Whether it has a parameter for the worker's sandbox."""
    try:
        return RUN_CODE in inspect.signature(reward).parameters
    except (TypeError, ValueError):  # of a builtin, which does not tell
        return False


def may_run_code(value: Any) -> bool:
    """Whether a value is a reward that asks for the sandbox, or has such a one among several."""
    if isinstance(value, Mapping):
        return any(map(may_run_code, value.values()))
    function = value[0] if isinstance(value, tuple) and value else value
    return callable(function) and runs_code(function)


def name_of(reward: Any, part: str = "") -> str:
    """The name by which messages call a reward. Args: part: its name among several."""
    name = str(getattr(reward, "__qualname__", type(reward).__qualname__))
    return name if part in ("", name) else f"{part} ({name})"


def place_of_definition(reward: Any) -> str:
    """Where a reward is defined, "" if Python does not know."""
    function = reward if inspect.isroutine(reward) else type(reward).__call__
    with suppress(ValueError):  # it wraps itself
        function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}" if code else ""
