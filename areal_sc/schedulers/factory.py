"""From `scheduler.type` to a scheduler: the one line that differs between machines."""

from __future__ import annotations

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.local import LocalScheduler


def make_scheduler(config: SchedulerConfig, folder: RunFolder | None = None) -> Scheduler:
    """The scheduler that `config.type` names.

    Args:
        folder: the run folder, where the caller has opened it. None: the scheduler takes the folder
            `config.run_dir` for this process until it is closed, and leaves what is in it, unless
            `config.overwrite` says otherwise.
    Raises:
        ConfigError: there is none of that name.
        RunFolderError: another process runs in the folder, or it cannot be used.
    """
    schedulers = {"local": LocalScheduler}
    if config.type not in schedulers:
        raise ConfigError(
            f"scheduler.type: expected one of {sorted(schedulers)}, got {config.type!r}"
        )
    return schedulers[config.type](config, folder)
