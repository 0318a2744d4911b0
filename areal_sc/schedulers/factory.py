"""From `scheduler.type` to a scheduler: the one line that differs between machines."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

from areal_sc.config.named_scheduler import own_scheduler
from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.run_folder import RunFolder
from areal_sc.schedulers.base import Scheduler
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.schedulers.no_nodes import NoNodes
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler

logger = logging.getLogger(__name__)

MakeScheduler = Callable[[SchedulerConfig, RunFolder | None], Scheduler]

_BUILT_IN: Final[dict[str, MakeScheduler]] = {
    SchedulerType.local: LocalScheduler,
    SchedulerType.slurm: SlurmScheduler,
}


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
    make: MakeScheduler = own_scheduler(config.type) or _BUILT_IN[config.type]
    if folder is None and config.run_only:
        logger.warning(
            "only a `Run` reads these settings, and this loop has none: %s; write it with "
            "`with Run(config) as run:` (examples/own_loop.py)",
            ", ".join(config.run_only),
        )
    if config.dry_run:
        make = NoNodes
    return make(config, folder)
