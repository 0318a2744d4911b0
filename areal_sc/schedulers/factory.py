"""From `scheduler.type` to a scheduler: the one line that differs between machines."""

from __future__ import annotations

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.local import LocalScheduler


def make_scheduler(config: SchedulerConfig) -> Scheduler:
    """The scheduler that `config.type` names.

    Raises: ConfigError: there is none of that name.
    """
    schedulers = {"local": LocalScheduler}
    if config.type not in schedulers:
        raise ConfigError(
            f"scheduler.type: expected one of {sorted(schedulers)}, got {config.type!r}"
        )
    return schedulers[config.type](config)
