"""Published weights as a rollout worker reads them, and the copy of them that it keeps for others.

A copy is made when the controller asks for one; the engine gets the weights later. It is a shard of
the worker's own store, so workers of this node map it, and others pull it. There is one at a time,
beside it one of the changes by which the version came: they go when the next ones are made, or when
the worker has got newer weights from elsewhere.
"""

from __future__ import annotations

import asyncio
import logging

import torch
from msgspec.structs import replace

from areal_sc.errors import StoreFull, TransportError
from areal_sc.transport.bulk.copies import NUM_COPY_THREADS
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.weights import ShardReference, WeightsReference
from areal_sc.workers.calls import CopyWeights
from areal_sc.workers.weight_changes import apply_all

logger = logging.getLogger(__name__)


class HeldWeights:
    """Calls of `copy` and `read` come one after the other.

    Attributes:
        counters: copies that were pulled whole; that were made of the version before and its
            changes; and changes that did not fit.
    """

    def __init__(self, plane: DataPlane) -> None:
        self.counters = {"whole_copies": 0, "changed_copies": 0, "unfit_changes": 0}
        self._plane = plane
        self._copy = self._changes = ""

    async def copy(self, wanted: CopyWeights) -> list[str]:
        """Ids of the new copy, and of that of its changes, if there is one.

        Raises: the errors of `Puller.copy_weights`; there is no copy then.
        """
        self._drop_changes()
        if not (await self._copy_changes(wanted) and await self._change_base(wanted)):
            self._drop_copy()
            self._copy = await self._pull(wanted, wanted.weights)
            self.counters["whole_copies"] += 1
        return [self._copy, self._changes] if self._changes else [self._copy]

    async def read(self, weights: WeightsReference) -> list[tuple[str, torch.Tensor]]:
        """Each parameter's name and values, [numel], which may be views that are only to be read.

        Raises: the errors of `Puller.pull_weights`.
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
            self._drop_copy()
            self._drop_changes()

    async def _copy_changes(self, wanted: CopyWeights) -> bool:
        """Also for those who have their base, and pull from here."""
        changes = wanted.weights.changes
        if changes is None:
            return False
        try:
            self._changes = await self._pull(wanted, replace(wanted.weights, shards=changes.shards))
        except StoreFull as error:
            logger.warning("policy_version=%d is pulled whole: %s", wanted.weights.version, error)
        return bool(self._changes)

    async def _change_base(self, wanted: CopyWeights) -> bool:
        """The new copy, of the base and the changes; False: it must be pulled whole."""
        if wanted.base is None:
            return False
        try:
            copy = await self._changed(wanted.base, wanted.spare_bytes)
        except TransportError as error:
            logger.warning("policy_version=%d is pulled whole: %s", wanted.weights.version, error)
            self.counters["unfit_changes"] += 1
            return False
        self._drop_copy()
        self._copy = copy
        self.counters["changed_copies"] += 1
        return True

    async def _changed(self, base: ShardReference, spare_bytes: int) -> str:
        store = self._plane.store
        tensors = dict(await self.read(WeightsReference(0, (base,))))
        lengths = {name: [len(tensor)] for name, tensor in tensors.items()}
        layout = ShardLayout.of(tensors, lengths, is_copy=True)
        # in threads, as all that takes as long as gigabytes do
        block = await asyncio.to_thread(store.begin, layout, spare_bytes=spare_bytes)
        try:
            memory = {n: block.memory[f.start : f.stop] for n, f in layout.fields.items()}
            changes = store.tensors(self._changes)
            await asyncio.to_thread(apply_all, tensors, changes, memory, NUM_COPY_THREADS)
            return store.seal(block)
        except BaseException:
            store.give_up(block)
            raise

    async def _pull(self, wanted: CopyWeights, weights: WeightsReference) -> str:
        return await self._plane.puller.copy_weights(weights, spare_bytes=wanted.spare_bytes)

    def _is_copy(self, weights: WeightsReference) -> bool:
        return [shard.shard_id for shard in weights.shards] == [self._copy]

    def _drop_copy(self) -> None:
        if self._copy:
            self._plane.store.remove(self._copy)
            self._copy = ""

    def _drop_changes(self) -> None:
        if self._changes:
            self._plane.store.remove(self._changes)
            self._changes = ""
