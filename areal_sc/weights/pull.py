"""Weights that the ranks seal in their stores, and rollout workers pull; see `tree`."""

from __future__ import annotations

from collections.abc import Sequence

from areal_sc.config.schema import WeightUpdateMethod
from areal_sc.errors import StoreFull
from areal_sc.weights import methods
from areal_sc.weights.channel import Channel, WeightsReader
from areal_sc.weights.published import WeightChanges, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.operations import Kind, Operation, digest


class PullChannel(Channel):
    """`weight_update.method: pull`."""

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        await self._forget_earlier()
        return await self._seal(operation, version)

    async def seal_again(self, lineage: int, version: int) -> WeightsReference | None:
        operation = Operation(lineage, version, Kind.publish, str(version), digest(None))
        try:
            return await self._seal(operation, version, keeps_earlier=True)
        except StoreFull:  # after several deaths; who reads the old copies asks for the new ones
            await self._forget_earlier()
            return await self._seal(operation, version)

    async def _seal(
        self, operation: Operation, version: int, *, keeps_earlier: bool = False
    ) -> WeightsReference:
        """The weights of the ranks, which forget all else that they have sealed.

        Args:
            keeps_earlier: but for what earlier lives have sealed, which may still be read.
        """
        with self.times.adding_to("publish_seal_s"):
            replies = await self._fleet.call_all(
                methods.SEAL_WEIGHTS, methods.SealWeights(operation, version)
            )
            adopted_live = None if keeps_earlier else ()
            await self._sweep(
                [calls.Sweep(r.last_sequence, r.live, adopted_live=adopted_live) for r in replies]
            )
        changes = _joined([reply.changes for reply in replies])
        if self._config.weight_update.method is WeightUpdateMethod.pull:
            whole_bytes = sum(reply.num_bytes for reply in replies)
            self.times.published_bytes += changes.num_bytes if changes else whole_bytes
        shards = tuple(reply.shard for reply in replies)
        nodes = tuple(sorted({member.worker.node for member in self._fleet.members}))
        return WeightsReference(
            version, shards, lineage=operation.lineage, nodes=nodes, changes=changes
        )


def _joined(parts: Sequence[WeightChanges | None]) -> WeightChanges | None:
    """The changes of all ranks; None: one has none, or of another version, as it is new."""
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.base for part in known}) != 1:
        return None
    shards = tuple(shard for part in known for shard in part.shards)
    return WeightChanges(known[0].base, shards, sum(part.num_bytes for part in known))
