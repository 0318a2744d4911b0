"""What the ranks of one model are asked for, when they train and when they are brought back.

A call is an operation, or changes nothing: so a repeat does nothing twice. It reads the rows where
they are now.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from areal_sc.controller.train.rank_layout import RankLayout
from areal_sc.controller.train.rank_state import Asked, RankState
from areal_sc.errors import ConfigError, RpcTimeout, WorkerLost
from areal_sc.fleet.fleet import Fleet
from areal_sc.workers.rank_methods import TRY_LOSS, TryLoss


@dataclass(eq=False)
class RankCalls:
    """Calls all ranks, once each.

    Attributes:
        layout: which rank computes what.
    """

    fleet: Fleet
    state: RankState

    def __post_init__(self) -> None:
        self.layout = RankLayout((0,), (0,))

    async def ask(self, asked: Asked) -> list[Any]:
        """The reply of each model group's head."""
        shares = [share.on(self.state.current) for share in asked.shares]
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

    async def repeat_step(self) -> None:
        """All that was asked for at the present version, in its order.

        Raises: ShardGone: rows of it are gone.
        """
        for call in list(self.state.calls):
            replies = await self.ask(call)
            for shard, again in zip(call.shards, replies, strict=False):  # most have sealed none
                self.state.move(shard.shard_id, again.shard)

    async def lose_hung(self, error: Exception) -> WorkerLost | None:
        """Ranks are started again if the error is that one has not replied in time; or None."""
        members = self.fleet.members
        if not isinstance(error, RpcTimeout):
            return None
        if all(member.name != error.silent for member in members):
            return None
        setting = "transport.call_timeout_s, of writes transport.write_timeout_s"
        return await self.fleet.lose_hung(error, members, setting)
