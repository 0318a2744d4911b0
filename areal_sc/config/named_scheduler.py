"""Schedulers by name: one of `SchedulerType`, or a class of the user's own by its import path."""

from __future__ import annotations

from typing import Any, Final

from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.user_code import named

_BUILT_IN: Final = [kind.value for kind in SchedulerType]


def own_scheduler(name: str) -> Any:
    """The class at `package.module:Class`; None: the name is one of `SchedulerType`.

    It is found as the caller would import it, that is also beside a script.

    Raises: ConfigError: there is none of that name.
    """
    if name in _BUILT_IN:
        return None
    return named(name, f"scheduler.type: expected {', '.join(_BUILT_IN)} or package.module:Class")
