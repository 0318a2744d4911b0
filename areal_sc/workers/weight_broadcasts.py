"""Weights on their way from the trainer to a weight group: rank 0 broadcasts whole parameters.

Consumes: calls of the TrainController, the same ones on every rank; `cancel_broadcast`, also from
rollout workers. Waits for: the ranks of the trainer, which gather, and those of the weight group.
Unblocked by: those, `cancel_broadcast`, or `weight_update.step_timeout_s`.
"""

from __future__ import annotations

import logging
import os
import threading
from typing import Final

from areal_sc.engines.base import PublishesWhole, able
from areal_sc.engines.weight_group import GLOO, NCCL, Backend, WeightBroadcaster
from areal_sc.errors import ConfigError, EngineFailed, StaleCall, TransportError
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.sockets.interface import host_of
from areal_sc.weights import BucketLayout, WeightBroadcast, WeightGroup
from areal_sc.workers.rank import Rank
from areal_sc.workers.rank_methods import CANCEL_BROADCAST, OpenWeightGroup, SentWeights

logger = logging.getLogger(__name__)

CANCEL_TIMEOUT_S: Final = 30.0


class WeightBroadcasts:
    """One rank's part in broadcasts to a weight group; that with the number 0 broadcasts."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._config = rank.handle.config.weight_update
        self._broadcaster: WeightBroadcaster | None = None
        self._group = ""
        self._cancelled = threading.Event()

    async def open_group(self, wanted: OpenWeightGroup) -> WeightGroup:
        """On rank 0: listens for the ranks of a new group, which replaces the one before.

        Raises: ConfigError: a generating rank has this rank's GPU, which NCCL does not allow.
        """
        self.close()
        backend: Backend = NCCL if wanted.is_cuda and self._whole.is_cuda else GLOO
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
            await self._rank.compute(lambda: self._whole.weight_layouts(self._config.bucket_bytes))
        )

    async def broadcast(self, _: None) -> SentWeights:
        """Sends all weights to the group; on other ranks than 0: helps rank 0 to gather them.

        A broadcast that fails ends the sending, and the other ranks gather to the end.
        """
        broadcaster = self._require_group() if self._rank.number == 0 else None
        cancelled = self._cancelled

        def send() -> SentWeights:
            num_bytes, failure = 0, ""
            for bucket in self._whole.gather_weights(self._config.bucket_bytes):
                if broadcaster is None or failure:
                    continue
                try:
                    num_bytes += broadcaster.broadcast(bucket, cancelled)
                except EngineFailed as error:
                    failure = str(error)
            return SentWeights(num_bytes, failure)

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

    @property
    def _whole(self) -> PublishesWhole:
        return able(self._rank.engine, PublishesWhole)

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
        await connection.call(CANCEL_BROADCAST, sent.group, timeout_s=CANCEL_TIMEOUT_S)
    except TransportError as error:
        # it gives up by itself, later
        logger.warning("group=%s broadcast not cancelled: %s", sent.group, error)
    finally:
        await connection.close()
