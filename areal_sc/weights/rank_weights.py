"""How a rank gives its weights away: sealed in its store, written to a folder, or broadcast.

    seal        a copy in the rank's store, and what has changed since the one before; pulled
    save        a Hugging Face folder of the version, which all sides see
    broadcast   rank 0 sends whole parameters to a weight group; the other ranks help to gather them

Consumes: calls of a `Channel`, the same ones on every rank; `cancel_broadcast`, also from rollout
workers. Waits for: the ranks of the trainer, which gather, and those of the weight group.
Unblocked by: those, `cancel_broadcast`, or `weight_update.step_timeout_s`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

import torch

from areal_sc.errors import ConfigError, EngineFailed, StaleCall, TransportError
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.sockets.interface import host_of
from areal_sc.weights import methods
from areal_sc.weights.changes import seal_changes
from areal_sc.weights.group import GLOO, NCCL, Backend, WeightBroadcaster
from areal_sc.weights.published import BucketLayout, WeightBroadcast, WeightChanges, WeightGroup
from areal_sc.workers.operations import digest
from areal_sc.workers.rank import Rank

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 30.0

_FOLDER_PREFIX: Final = "policy-"


class SealedVersion(NamedTuple):
    """Weights that a rank has sealed.

    Attributes:
        policy: (lineage, version).
        whole, changes: ids of shards; "" where there are no changes.
    """

    policy: tuple[int, int]
    whole: str
    changes: str


class RankWeights:
    """One rank's part in publications; in broadcasts that with the number 0 sends."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._config = rank.handle.config.weight_update
        self._folder = Path(self._config.folder).absolute()
        self._last: SealedVersion | None = None  # of this life
        self._broadcaster: WeightBroadcaster | None = None
        self._group = ""
        self._cancelled = threading.Event()

    def served(self) -> list[Served]:
        """The methods that it answers."""
        using = self._rank.using
        return [
            methods.SEAL_WEIGHTS.served_by(using(self.seal)),
            methods.SAVE_WEIGHTS.served_by(using(self.save)),
            methods.OPEN_WEIGHT_GROUP.served_by(self.open_group),
            methods.MEET_WEIGHT_GROUP.served_by(self.meet_group),
            methods.WEIGHT_LAYOUTS.served_by(self.layouts),
            methods.BROADCAST_WEIGHTS.served_by(self.broadcast),
            methods.CANCEL_BROADCAST.served_by(self.cancel_broadcast),
        ]

    async def seal(self, args: methods.SealWeights) -> methods.SealedWeights:
        """Seals a copy of what this rank holds of the parameters, and what has changed in them."""
        rank, before = self._rank, self._last

        async def seal() -> methods.SealedWeights:
            store = rank.plane.store
            if before is not None and before.changes:  # everybody has what they were read for
                store.remove(before.changes)
            # in the engine's thread: the event loop must not wait for gigabytes
            with rank.recorder.span("publishing weights", version=args.version):
                whole = await rank.compute(self._put_whole)
                changes = await rank.compute(lambda: self._put_changes(before, whole, args.version))
            self._last = SealedVersion((args.operation.lineage, args.version), whole, changes)
            changed = None
            if before is not None and changes:
                shards = (rank.sealed(changes).shard,)
                changed = WeightChanges(before.policy, shards, store.bytes_of(changes))
            sealed, num_bytes = rank.sealed(whole), store.bytes_of(whole)
            return methods.SealedWeights(sealed.shard, sealed.last_sequence, num_bytes, changed)

        return await rank.operations.join(args.operation, seal, next_version=args.version)

    def _put_whole(self) -> str:
        """Seals this rank's part; all ranks do so together. Returns the shard's id."""
        unfilled, values = self._rank.engine.published_parts()
        lengths = {name: [len(part)] for name, part in unfilled.items()}
        try:
            return self._rank.plane.store.put(unfilled, lengths, values=values)
        finally:
            for _ in values:  # other ranks may wait for this one's part in them
                pass

    def _put_changes(self, before: SealedVersion | None, whole: str, version: int) -> str:
        """Seals what has changed since the version before; "": that is not due, or too much."""
        store = self._rank.plane.store
        is_due = self._config.has_changes and version % self._config.whole_every_steps > 0
        if before is None or not is_due or before.whole not in store:
            return ""
        return seal_changes(store, before.whole, whole, torch.get_num_threads())

    async def save(self, args: methods.SaveWeights) -> methods.SavedWeights:
        """Writes the weights to a folder of their policy below `weight_update.folder`."""
        rank, lineage = self._rank, args.operation.lineage
        engine, root = rank.engine, self._folder
        # other runs may have the same `weight_update.folder`
        prefix = f"{_FOLDER_PREFIX}{digest([args.run])}-"
        folder = root / f"{prefix}{lineage}-{args.version}"

        async def save() -> methods.SavedWeights:
            if rank.number == 0:
                await asyncio.to_thread(remove_before, root, prefix, [lineage, args.oldest])
            with rank.recorder.span("publishing weights", version=args.version):
                written = await rank.compute(lambda: engine.begin_save_hf(folder, is_staged=False))
                await asyncio.wrap_future(written)
            return methods.SavedWeights(str(folder), rank.plane.store.last_sequence)

        return await rank.operations.join(args.operation, save, next_version=args.version)

    async def open_group(self, wanted: methods.OpenWeightGroup) -> WeightGroup:
        """On rank 0: listens for the ranks of a new group, which replaces the one before.

        Raises: ConfigError: a generating rank has this rank's GPU, which NCCL does not allow.
        """
        self.close()
        backend: Backend = NCCL if wanted.is_cuda and self._rank.engine.is_cuda else GLOO
        if backend == NCCL and (shared := set(wanted.devices) & set(own_devices(self._rank.node))):
            raise ConfigError(
                f"weight_update.method: collective needs GPUs of their own for training and "
                f"generation, and both use {', '.join(sorted(shared))}; choose pull"
            )
        self._group = wanted.name
        self._cancelled = threading.Event()  # a broadcast to the group before may still go on
        self._broadcaster = WeightBroadcaster(
            wanted.name, host_of(self._rank.address), backend, self._config.step_timeout_s
        )
        return self._broadcaster.describe(wanted.world_size)

    async def meet_group(self, world_size: int) -> None:
        """On rank 0: returns when all ranks of the group are there.

        Raises: EngineFailed: they were not in time.
        """
        broadcaster = self._require_group()
        await self._rank.compute(lambda: broadcaster.meet(world_size))

    async def layouts(self, _: None) -> tuple[BucketLayout, ...]:
        """The broadcasts of one publication."""
        return tuple(
            await self._rank.compute(
                lambda: self._rank.engine.weight_layouts(self._config.bucket_bytes)
            )
        )

    async def broadcast(self, _: None) -> methods.SentWeights:
        """Sends all weights to the group; on other ranks than 0: helps rank 0 to gather them.

        A broadcast that fails ends the sending, and the other ranks gather to the end.
        """
        broadcaster = self._require_group() if self._rank.number == 0 else None
        cancelled = self._cancelled

        def send() -> methods.SentWeights:
            num_bytes, failure = 0, ""
            for bucket in self._rank.engine.gather_weights(self._config.bucket_bytes):
                if broadcaster is None or failure:
                    continue
                try:
                    num_bytes += broadcaster.broadcast(bucket, cancelled)
                except EngineFailed as error:
                    failure = str(error)
            return methods.SentWeights(num_bytes, failure)

        sent = await self._rank.compute(send)
        if sent.failure and self._broadcaster is broadcaster:  # else another group is open by now
            self.close()
        return sent

    def cancel_broadcast(self, group: str) -> None:
        """Ends a broadcast that goes on in this group, or would come; no error if there is none."""
        if group == self._group:
            self._cancelled.set()

    def close(self) -> None:
        """Leaves the weight group, if any."""
        if self._broadcaster is not None:
            self._broadcaster.close()
            self._broadcaster = None
            self._group = ""

    def _require_group(self) -> WeightBroadcaster:
        if self._broadcaster is None:
            raise StaleCall("there is no weight group; open one first")
        return self._broadcaster


def own_devices(node: str) -> list[str]:
    """`<node>/<GPU>` for every GPU that this process was given."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return [f"{node}/{name}" for name in visible.split(",") if name]


async def cancel_broadcast(transport: ZmqTransport, sent: WeightBroadcast) -> None:
    """Tells the worker that broadcasts that some ranks will not take part."""
    node_id, address, shard_id = sent.root
    incarnation, _ = parse_shard_id(shard_id)
    connection = transport.connect(address, node_id, incarnation)
    try:
        await connection.call(methods.CANCEL_BROADCAST, sent.group, timeout_s=CANCEL_TIMEOUT_S)
    except TransportError as error:
        # it gives up by itself, later
        logger.warning("group=%s broadcast not cancelled: %s", sent.group, error)
    finally:
        await connection.close()


def remove_before(root: Path, prefix: str, oldest: list[int]) -> None:
    """Removes folders of the run's older policies; whoever reads one has been waited for."""
    for folder in root.glob(f"{prefix}*-*"):
        with suppress(ValueError):
            policy = [int(part) for part in folder.name.removeprefix(prefix).split("-")]
            if policy < oldest:
                shutil.rmtree(folder, ignore_errors=True)
