"""Published weights as a rollout worker reads them, and the copy of them that it keeps for others.

A copy is made when the controller asks for one; the engine gets the weights later. It is a shard of
the worker's own store, so workers of this node map it, and others pull it. There is one at a time:
it goes when the next one is made, or when the worker has got newer weights from elsewhere.
"""

from __future__ import annotations

import asyncio

import torch

from areal_sc.transport.plane import DataPlane
from areal_sc.weights import WeightsReference
from areal_sc.workers.calls import CopyWeights


class HeldWeights:
    """Calls of `copy` and `read` come one after the other."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane
        self._copy = ""

    async def copy(self, wanted: CopyWeights) -> str:
        """Id of the new copy. Raises: as `Puller.copy_weights`; there is no copy then."""
        self._drop()
        self._copy = await self._plane.puller.copy_weights(
            wanted.weights, spare_bytes=wanted.spare_bytes
        )
        return self._copy

    async def read(self, weights: WeightsReference) -> list[tuple[str, torch.Tensor]]:
        """Each parameter's name and values, [numel], which may be views that are only to be read.

        Raises: as `Puller.pull_weights`.
        """
        if self._is_copy(weights):
            return list(self._plane.store.tensors(self._copy).items())
        # in a thread: to join gigabytes takes seconds, in which nobody else would be served
        return [
            (name, parts[0] if len(parts) == 1 else await asyncio.to_thread(torch.cat, parts))
            async for name, parts in self._plane.puller.pull_weights(weights)
        ]

    def keep_only(self, weights: WeightsReference) -> None:
        """A copy of other weights goes: the engine has these."""
        if not self._is_copy(weights):
            self._drop()

    def _is_copy(self, weights: WeightsReference) -> bool:
        return [shard.shard_id for shard in weights.shards] == [self._copy]

    def _drop(self) -> None:
        if self._copy:
            self._plane.store.remove(self._copy)
            self._copy = ""
