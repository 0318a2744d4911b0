"""What the ranks of one model are asked for, when they train and when they are brought back.

Each of it is an operation, or changes nothing: a repeat does nothing twice. A repeat reads the rows
where they are now, and seals the same versions.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from areal_sc.controller.train.publication import Publisher
from areal_sc.controller.train.rank_layout import RankLayout
from areal_sc.controller.train.train_history import (
    BegunWrite,
    Call,
    Computed,
    PPOUpdated,
    SFTUpdated,
    TrainHistory,
    Updated,
)
from areal_sc.errors import StoreFull
from areal_sc.fleet.fleet import Fleet
from areal_sc.weights import WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.operations import Operation, digest


class RankCalls:
    """Calls all ranks, once each.

    Attributes:
        layout: which rank computes what.
    """

    def __init__(self, fleet: Fleet, publisher: Publisher, history: TrainHistory) -> None:
        self.layout = RankLayout((0,), (0,))
        self._fleet = fleet
        self._publisher = publisher
        self._history = history

    async def compute(self, shares: Sequence[calls.Compute]) -> list[calls.SealedShard]:
        """What the head of each share has sealed."""
        current = [
            structs.replace(share, batch=self._history.current(share.batch)) for share in shares
        ]
        replies = await self._fleet.call_each(calls.COMPUTE, self.layout.spread(current))
        return self.layout.of_heads(replies)

    async def update(self, update: Updated) -> dict[str, float]:
        """Metrics of an update."""
        replies: list[calls.Numbers]
        if isinstance(update, PPOUpdated):
            shares = [
                structs.replace(
                    share, minibatches=tuple(map(self._history.current, share.minibatches))
                )
                for share in update.shares
            ]
            replies = await self._fleet.call_each(calls.PPO_UPDATE, self.layout.spread(shares))
        else:
            replies = await self._fleet.call_each(
                calls.SFT_UPDATE, self.layout.spread(update.shares)
            )
        return dict(self.layout.of_heads(replies)[0])

    async def begin_write(self, change: calls.Change) -> str:
        """The ranks take what they write; returns where they write an export."""
        if isinstance(change, calls.Snapshot):
            await self._fleet.call_all(calls.BEGIN_SNAPSHOT, change)
            return ""
        return (await self._fleet.call_all(calls.BEGIN_SAVE_HF, change))[0]

    async def repeat_step(self, version: int) -> None:
        """All that was asked for at a version, in its order.

        Raises: ShardGone: rows of it are gone.
        """
        for call in self._history.calls_at(version):
            await self._repeat(call)

    async def advance_again(self, version: int) -> WeightsReference | None:
        """The ranks go to the next version; returns its weights, if it is one that has some."""
        if any(isinstance(call, SFTUpdated) for call in self._history.calls_at(version)):
            return None
        return await self.seal_again(version, version + 1)

    async def seal_again(self, version: int, sealed: int) -> WeightsReference:
        """The weights that the ranks seal at `version`, as those of version `sealed`."""
        name = f"publish_weights/{sealed}"
        operation = Operation(self._history.lineage, version, name, digest(None))
        try:
            return await self._publisher.seal(operation, sealed, keeps_adopted=True)
        except StoreFull:  # after several deaths; who reads the old copies asks for the new ones
            await self._publisher.sweep_adopted()
            return await self._publisher.seal(operation, sealed)

    async def _repeat(self, call: Call) -> None:
        match call:
            case Computed(shares, shards):
                sealed = await self.compute(shares)
                for shard, again in zip(shards, sealed, strict=True):
                    self._history.move(shard.shard_id, again.shard)
            case PPOUpdated() | SFTUpdated():
                await self.update(call)
            case BegunWrite(change):
                await self.begin_write(change)
