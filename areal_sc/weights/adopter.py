"""How a rollout worker gets a version: its engine adopts it, or the worker keeps a copy for others.

    adopt ──► of a folder                    engine.update_weights_from_disk
         ├──► of a broadcast                 engine.update_weights_from_group
         └──► of shards, or a copy of them   engine.update_weights

A copy is made when the controller asks for one; the engine gets the weights later. It is a shard of
the worker's own store, so workers of this node map it, and others pull it. There is one at a time,
beside it one of the changes by which the version came: they go when the next ones are made, or when
the worker has got newer weights from elsewhere.

Consumes: `adopt_weights`, `copy_weights`. Waits for: the shards of ranks, or copies of other
workers; the engine. Unblocked by: those, or the time limits of pulls and of the engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from areal_sc.engines.base import FollowingEngine
from areal_sc.errors import StoreFull, TransportError
from areal_sc.hub import local_model
from areal_sc.transport.bulk.copies import NUM_COPY_THREADS
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.user_code import EpisodeClock
from areal_sc.weights import methods
from areal_sc.weights.changes import apply_all
from areal_sc.weights.published import ShardReference, WeightsReference
from areal_sc.weights.rank_weights import cancel_broadcast, own_devices
from areal_sc.workers.base import Worker
from areal_sc.workers.calls import NO_POLICY

logger = logging.getLogger(__name__)


class Adopter:
    """Brings each version to the engine of a worker.

    Args:
        worker: whose store, data plane and address are used.
        engine: of the worker, once it is built.
        clock: of episodes; it stands still while the engine is asleep.

    Attributes:
        policy: (lineage, version) of the engine's weights; None: those that it was built with.
        held: the copy that others read.
    """

    def __init__(
        self, worker: Worker, engine: Callable[[], FollowingEngine], clock: EpisodeClock
    ) -> None:
        self.policy: tuple[int, int] | None = None
        self.held = HeldWeights(worker.plane)
        self._worker = worker
        self._engine = engine
        self._clock = clock
        self._one_at_a_time = asyncio.Lock()

    def served(self) -> list[Served]:
        """The methods that it answers."""
        return [
            methods.ADOPT_WEIGHTS.served_by(self.adopt),
            methods.COPY_WEIGHTS.served_by(self.copy),
            methods.WEIGHT_RANKS.served_by(self.weight_ranks),
            methods.JOIN_WEIGHT_GROUP.served_by(
                lambda args: self._engine().join_group(args.group, args.first_rank)
            ),
            methods.LEAVE_WEIGHT_GROUP.served_by(lambda group: self._engine().leave_group(group)),
        ]

    async def adopt(self, weights: WeightsReference) -> None:
        """Gives the engine the weights of a version, in the way that the trainers publish them.

        Those that it holds already change nothing: what a controller asked for before it died ends
        by itself.
        """
        async with self._one_at_a_time:
            if self.policy != weights.policy:
                with self._worker.recorder.span("updating weights", version=weights.version):
                    await self._give_engine(weights)
                self.policy = weights.policy
                self._clock.go_on()
                self.held.keep_only(weights)
                logger.info("policy_version=%d", weights.version)

    async def _give_engine(self, weights: WeightsReference) -> None:
        async def read() -> list[tuple[str, torch.Tensor]]:
            with self._worker.recorder.span("fetching weights", version=weights.version):
                return await self.held.read(weights)

        if weights.folder or weights.is_of_model_folder:
            config = self._worker.handle.config
            folder = Path(weights.folder or local_model(config.path))
            await self._engine().update_weights_from_disk(weights.version, folder)
        elif sent := weights.broadcast:
            await self._engine().update_weights_from_group(
                weights.version,
                sent.group,
                sent.buckets,
                again=read,
                give_up=lambda: cancel_broadcast(self._worker.transport, sent),
            )
        else:
            await self._engine().update_weights(weights.version, read)

    async def copy(self, wanted: methods.CopyWeights) -> tuple[ShardReference, ...]:
        """Keeps a copy that others read; see `COPY_WEIGHTS`."""
        async with self._one_at_a_time:
            ids = await self.held.copy(wanted)
        logger.info("policy_version=%d is served to others", wanted.weights.version)
        name, address = self._worker.spec.name, self._worker.address
        return tuple(ShardReference(name, address, shard_id) for shard_id in ids)

    async def sleep(self) -> None:
        """The engine gives up the memory of its device until it adopts weights."""
        async with self._one_at_a_time:
            await self._engine().sleep()
            self._clock.stop()
            self.policy = NO_POLICY

    async def weight_ranks(self, group: str) -> methods.WeightRanks:
        """What the engine needs in a weight group."""
        engine = self._engine()
        return methods.WeightRanks(
            num_ranks=engine.count_ranks(),
            is_cuda=engine.is_cuda,
            devices=tuple(own_devices(self._worker.node)) if engine.is_cuda else (),
            is_member=engine.has_whole_group(group),
        )


class HeldWeights:
    """The copy of published weights that a worker keeps for others.

    Calls of `copy` and `read` come one after the other.

    Attributes:
        counters: copies that were pulled whole; that were made of the version before and its
            changes; and changes that did not fit.
    """

    def __init__(self, plane: DataPlane) -> None:
        self.counters = {"whole_copies": 0, "changed_copies": 0, "unfit_changes": 0}
        self._plane = plane
        self._copy = self._changes = ""

    async def copy(self, wanted: methods.CopyWeights) -> list[str]:
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

    async def _copy_changes(self, wanted: methods.CopyWeights) -> bool:
        """Also for those who have their base, and pull from here."""
        changes = wanted.weights.changes
        if changes is None:
            return False
        try:
            self._changes = await self._pull(wanted, replace(wanted.weights, shards=changes.shards))
        except StoreFull as error:
            logger.warning("policy_version=%d is pulled whole: %s", wanted.weights.version, error)
        return bool(self._changes)

    async def _change_base(self, wanted: methods.CopyWeights) -> bool:
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

    async def _pull(self, wanted: methods.CopyWeights, weights: WeightsReference) -> str:
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
