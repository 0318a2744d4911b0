"""`--dry-run`: a scheduler that has no machine to lend."""

from __future__ import annotations

from typing import NoReturn

from areal_sc.config.schema import SchedulerConfig
from areal_sc.errors import ConfigError
from areal_sc.run.run_folder import RunFolder
from areal_sc.run.run_owner import RunTerm
from areal_sc.run.status_board import StatusBoard
from areal_sc.schedulers.base import Node
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.security.passes import Passes


class NoNodes:
    """Stands where a loop needs a scheduler; writes nothing, and starts nothing."""

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
