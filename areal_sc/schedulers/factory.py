"""From `scheduler.type` to a scheduler: the one line that differs between machines."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, NoReturn

from areal_sc.config.schema import SchedulerConfig
from areal_sc.config.slurm_settings import SchedulerType, own_scheduler
from areal_sc.errors import ArealError, ConfigError, SchedulerSilent
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.schedulers.base import Node, Scheduler
from areal_sc.schedulers.local import LocalScheduler
from areal_sc.schedulers.ray.scheduler import RayScheduler
from areal_sc.schedulers.slurm.scheduler import SlurmScheduler
from areal_sc.system.process import refuse_in_worker, refuse_several_starts
from areal_sc.system.telling import tell
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes
from areal_sc.user_code import Raised, await_user_code, blame

logger = logging.getLogger(__name__)

MakeScheduler = Callable[[SchedulerConfig, RunFolder | None], Scheduler]

_BUILT_IN: Final[dict[str, MakeScheduler]] = {
    SchedulerType.local: LocalScheduler,
    SchedulerType.slurm: SlurmScheduler,
    SchedulerType.ray: RayScheduler,
}
_AWAITED: Final = ("nodes", "ended_nodes", "renew", "ask_node", "give_back")


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
    refuse_in_worker("make_scheduler")
    refuse_several_starts()
    own: MakeScheduler | None = own_scheduler(config.type)
    if folder is None and config.run_only:
        logger.warning(
            "only a `Run` reads these settings, and this loop has none: %s; write it with "
            "`with Run(config) as run:` (examples/own_loop.py)",
            ", ".join(config.run_only),
        )
    if config.dry_run:
        return NoNodes(config, folder)
    if own is None:
        return _BUILT_IN[config.type](config, folder)
    try:
        scheduler = own(config, folder)
    except (ArealError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything
        raise ConfigError(f"scheduler.type: {config.type} raised {blame(error)}") from error
    for name in _AWAITED:
        if method := getattr(scheduler, name, None):
            setattr(scheduler, name, _bordered(method, f"{config.type}: {name}"))
    scheduler.close = partial(tell, scheduler.close)  # type: ignore[method-assign]
    return scheduler


class NoNodes:
    """`--dry-run`: a scheduler that has no machine to lend; writes nothing, and starts nothing."""

    term: RunTerm | None = None

    def __init__(self, config: SchedulerConfig, folder: RunFolder | None = None) -> None:
        self.config = config
        self.keys = RunKeys.create()
        self.passes = Passes(self.keys, 0, is_first=True)
        self.status = StatusBoard()

    async def nodes(self) -> NoReturn:
        raise ConfigError(
            "--dry-run: the task is looked at in a `start` block or a `Run` alone; what this "
            "script would start is shown above"
        )

    async def ended_nodes(self) -> dict[Node, str]:
        return {}

    async def renew(self, node: Node, incarnation: str) -> NoReturn:
        await self.nodes()

    def close(self) -> None:
        """There is nothing to give back."""


def _bordered(
    method: Callable[..., Awaitable[Any]], what: str
) -> Callable[..., Coroutine[Any, Any, Any]]:
    """A method of the user's scheduler; beside errors of this package it raises SchedulerSilent."""

    async def call(*args: Any) -> Any:
        try:
            return await await_user_code(lambda: method(*args))
        except Raised as raised:
            if isinstance(raised.error, ArealError):
                raise raised.error from None
            raise SchedulerSilent(f"{what} raised {blame(raised.error)}") from raised.error

    return call
