"""What the ranks of one model are asked for, when they train and when they are brought back.

Each of it is an operation, or changes nothing: a repeat does nothing twice. A repeat reads the rows
where they are now, and seals the same versions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_sc.controller.train.publication import Publisher
from areal_sc.controller.train.rank_layout import RankLayout
from areal_sc.controller.train.train_history import Asked, TrainHistory
from areal_sc.errors import ConfigError, RpcTimeout, StoreFull, WorkerLost
from areal_sc.fleet.fleet import Fleet
from areal_sc.weights import WeightsReference
from areal_sc.workers.operations import Kind, Operation, digest
from areal_sc.workers.rank_methods import TRY_LOSS, TryLoss, Update


@dataclass(eq=False)
class RankCalls:
    """Calls all ranks, once each.

    Attributes:
        layout: which rank computes what.
    """

    fleet: Fleet
    publisher: Publisher
    history: TrainHistory

    def __post_init__(self) -> None:
        self.layout = RankLayout((0,), (0,))

    async def ask(self, asked: Asked) -> list[Any]:
        """The reply of each model group's head."""
        shares = [share.on(self.history.current) for share in asked.shares]
        replies = await self.fleet.call_each(asked.method, self.layout.spread(shares))
        return self.layout.of_heads(replies)

    async def try_loss(self, loss: int) -> None:
        """Every rank tries the loss of this number on the same rows.

        Raises: ConfigError: it is none, or its metrics depend on the rank.
        """
        tried = await self.fleet.call_all(TRY_LOSS, TryLoss(loss))
        for rank, names in enumerate(tried):
            if names != tried[0]:
                raise ConfigError(
                    f"actor.ppo.loss: on the same rows it gives the metrics {', '.join(tried[0])} "
                    f"on rank 0, and {', '.join(names)} on rank {rank}: a mean over ranks would "
                    "be one over some of them"
                )

    async def repeat_step(self, version: int) -> None:
        """All that was asked for at a version, in its order.

        Raises: ShardGone: rows of it are gone.
        """
        for call in self.history.calls_at(version):
            replies = await self.ask(call)
            for shard, again in zip(call.shards, replies, strict=False):  # most have sealed none
                self.history.move(shard.shard_id, again.shard)

    async def advance_again(self, version: int) -> WeightsReference | None:
        """The ranks go to the next version; returns its weights, if it is one that has some."""
        shares = (share for call in self.history.calls_at(version) for share in call.shares)
        if any(isinstance(share, Update) and share.advances for share in shares):
            return None
        return await self.seal_again(version, version + 1)

    async def seal_again(self, version: int, sealed: int) -> WeightsReference:
        """The weights that the ranks seal at `version`, as those of version `sealed`."""
        lineage = self.history.lineage
        operation = Operation(lineage, version, Kind.publish, str(sealed), digest(None))
        try:
            return await self.publisher.seal(operation, sealed, keeps_adopted=True)
        except StoreFull:  # after several deaths; who reads the old copies asks for the new ones
            await self.publisher.sweep_adopted()
            return await self.publisher.seal(operation, sealed)

    async def lose_hung(self, error: Exception) -> WorkerLost | None:
        """Ranks are started again if the error is that one has not replied in time; or None."""
        members = self.fleet.members
        if not isinstance(error, RpcTimeout):
            return None
        if all(member.name != error.silent for member in members):
            return None
        setting = "transport.call_timeout_s, of writes transport.write_timeout_s"
        return await self.fleet.lose_hung(error, members, setting)
