"""The nodes that workers of one role may get, where a run may have more of them, or fewer.

    more workers than places ──► AsksForNodes.ask_node ──► a node that is on its way
    a node without workers   ──► AsksForNodes.give_back

A scheduler that does not ask for nodes lends the same ones all the time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from areal_sc.config.placement import Purpose
from areal_sc.errors import ArealError, ConfigError
from areal_sc.nodes.spec import WorkerOrder
from areal_sc.schedulers.base import AsksForNodes, Node, Scheduler, lack_of_places

logger = logging.getLogger(__name__)


class NodeRoom:
    """Used by the fleet of one role."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._given_back: set[Node] = set()  # or about to be

    async def nodes_for(
        self, present: Sequence[WorkerOrder], further: Sequence[WorkerOrder]
    ) -> list[Node]:
        """The nodes of the run, with room for all of these workers.

        Raises: ConfigError: there is no such room, and none to be had. SchedulerSilent: the
            scheduler cannot be asked now.
        """
        asked: list[Node] = []
        try:
            while True:
                nodes = [it for it in await self._scheduler.nodes() if it not in self._given_back]
                lack = lack_of_places([*present, *further], nodes)
                if not lack:
                    return nodes
                if not isinstance(self._scheduler, AsksForNodes):
                    raise ConfigError(lack)
                asked.append(await self._scheduler.ask_node())
                if lack := lack_of_places(further[:1], asked[-1:]):
                    raise ConfigError(f"{asked[-1].name}: {lack}")
        except ArealError:
            await self.give_back(asked)
            raise

    def close(self, node: Node) -> None:
        """Nobody is placed there any more; `give_back` follows."""
        self._given_back.add(node)

    async def give_back(self, nodes: Iterable[Node]) -> None:
        """Nodes on which nobody works, as far as they are for rollout workers alone."""
        nodes = set(nodes)
        self._given_back |= nodes
        own = [node for node in nodes if node.purpose is Purpose.rollout]
        try:
            if isinstance(self._scheduler, AsksForNodes):
                await asyncio.gather(*map(self._scheduler.give_back, own))
        except ArealError as error:
            logger.warning("nodes may be left until the run ends: %s", error)
        finally:
            self._given_back -= nodes
