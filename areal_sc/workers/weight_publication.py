"""The trainer's side of a publication: one rank seals, writes or broadcasts its weights.

    seal        its share of each bucket of whole parameters in this rank's store, to be pulled
    save        a Hugging Face folder, written by all ranks; those of older versions go
    broadcast   whole parameters, gathered from all ranks, from rank 0 to the generating ranks

Consumes: calls of the TrainController, the same ones on every rank; `cancel_broadcast`, also from
rollout workers. Waits for: the disk, the ranks of the trainer, the ranks of the weight group.
Unblocked by: those, `cancel_broadcast`, or `weight_update.step_timeout_s`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from areal_sc.config.schema import WeightUpdateConfig
from areal_sc.engines.base import TrainEngine
from areal_sc.engines.weight_group import (
    GLOO,
    NCCL,
    Backend,
    NamedTensor,
    WeightBroadcaster,
    flat_share,
    unfilled,
)
from areal_sc.errors import ConfigError, EngineFailed, StaleCall
from areal_sc.transport.shards.store import TensorStore
from areal_sc.weights import BucketLayout, WeightGroup
from areal_sc.workers.calls import OpenWeightGroup, SentWeights

_FOLDER_PREFIX = "version-"

Compute = Callable[[Callable[[], Any]], Awaitable[Any]]


class WeightPublication:
    """Publishes the weights of one rank.

    Args:
        compute: runs a function in the engine's thread.
        rank, world_size: of the trainer's ranks; rank 0 broadcasts.
        host: address of this machine that the generating ranks reach.
        node: token of this rank's node.
    """

    def __init__(
        self,
        engine: TrainEngine,
        store: TensorStore,
        config: WeightUpdateConfig,
        compute: Compute,
        *,
        rank: int,
        world_size: int,
        host: str,
        node: str,
    ) -> None:
        self._engine = engine
        self._store = store
        self._config = config
        self._compute = compute
        self._root = Path(config.folder).absolute()
        self._rank = rank
        self._world_size = world_size
        self._host = host
        self._node = node
        self._broadcaster: WeightBroadcaster | None = None
        self._group = ""
        self._cancelled = threading.Event()

    async def seal(self) -> str:
        """Id of the shard that holds a copy of this rank's part of the parameters.

        Where ranks hold no ranges of the flat parameters, it is the `flat_share` of each bucket.

        Raises: StoreFull: the other ranks are helped to the end, and this one raises.
        """
        # in the engine's thread: the event loop must not wait for gigabytes
        return await self._compute(self._seal)  # type: ignore[no-any-return]

    def _seal(self) -> str:
        layouts = self._engine.weight_layouts(self._config.bucket_bytes)
        parts = self._engine.flat_parts()
        if parts is None:
            return self._seal_gathered(layouts)
        dtypes = {name: t.dtype for layout in layouts for name, t in unfilled(layout)}
        return self._put(
            [(name, torch.empty_like(p, dtype=dtypes[name], device="meta")) for name, p in parts],
            (part.to(dtypes[name]) for name, part in parts),
        )

    def _seal_gathered(self, layouts: Iterable[BucketLayout]) -> str:
        buckets = self._engine.gather_weights(self._config.bucket_bytes)

        def values() -> Iterator[torch.Tensor]:
            for bucket in buckets:
                parts = self._share(bucket)
                bucket.clear()  # what others publish need not wait for the copies
                while parts:
                    yield parts.pop(0)[1]

        try:
            fields = [part for layout in layouts for part in self._share(unfilled(layout))]
            return self._put(fields, values())
        finally:
            for _ in buckets:  # all ranks go through all buckets
                pass

    def _share(self, bucket: Iterable[NamedTensor]) -> list[NamedTensor]:
        return flat_share(bucket, self._rank, self._world_size)

    def _put(self, fields: Iterable[NamedTensor], values: Iterable[torch.Tensor]) -> str:
        by_name = dict(fields)
        lengths = {name: [len(field)] for name, field in by_name.items()}
        return self._store.put(by_name, lengths, values=values)

    async def save(self, version: int, oldest: int) -> str:
        """Writes all weights to the folder of a version; returns its path.

        Args:
            oldest: version that somebody may still read; the folders before go.
        Raises: CheckpointError: it could not be written.
        """
        root = self._root
        folder = root / f"{_FOLDER_PREFIX}{version}"
        if self._rank == 0:
            await asyncio.to_thread(_remove_before, root, oldest)
        await self._compute(lambda: self._engine.save_hf(folder))
        return str(folder)

    async def open_group(self, wanted: OpenWeightGroup) -> WeightGroup:
        """On rank 0: listens for the ranks of a new group, which replaces the one before.

        Raises: ConfigError: a generating rank has this rank's GPU, which NCCL does not allow.
        """
        self.close()
        backend: Backend = NCCL if wanted.is_cuda and self._engine.is_cuda else GLOO
        if backend == NCCL and (shared := set(wanted.devices) & set(own_devices(self._node))):
            raise ConfigError(
                f"weight_update.method: collective needs GPUs of their own for training and "
                f"generation, and both use {', '.join(sorted(shared))}; choose pull"
            )
        self._group = wanted.name
        self._cancelled.clear()
        self._broadcaster = WeightBroadcaster(
            wanted.name, self._host, backend, self._config.step_timeout_s
        )
        return self._broadcaster.describe(wanted.world_size)

    async def meet_group(self, world_size: int) -> None:
        """On rank 0: returns when all ranks of the group are there.

        Raises: EngineFailed: they were not in time.
        """
        broadcaster = self._require_group()
        await self._compute(lambda: broadcaster.meet(world_size))

    async def layouts(self) -> tuple[BucketLayout, ...]:
        """The broadcasts of one publication."""
        return tuple(
            await self._compute(lambda: self._engine.weight_layouts(self._config.bucket_bytes))
        )

    async def broadcast(self) -> SentWeights:
        """Sends all weights to the group; on other ranks than 0: helps rank 0 to gather them.

        A broadcast that fails ends the sending, and the other ranks gather to the end.
        """
        broadcaster = self._require_group() if self._rank == 0 else None

        def send() -> SentWeights:
            num_bytes, failure = 0, ""
            for bucket in self._engine.gather_weights(self._config.bucket_bytes):
                if broadcaster is None or failure:
                    continue
                try:
                    num_bytes += broadcaster.broadcast(bucket, self._cancelled)
                except EngineFailed as error:
                    failure = str(error)
            return SentWeights(num_bytes, failure)

        sent: SentWeights = await self._compute(send)
        if sent.failure:
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


def _remove_before(root: Path, oldest: int) -> None:
    """Folders of older versions; whoever reads one has been waited for."""
    for folder in root.glob(_FOLDER_PREFIX + "*"):
        with suppress(ValueError):
            if int(folder.name.removeprefix(_FOLDER_PREFIX)) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
