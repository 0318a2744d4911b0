"""Rank 0 of a weight group, as a trainer is."""

from __future__ import annotations

import asyncio
import threading

import torch
from integration.sglang.policies import Policies

from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.weights.group import WeightBroadcaster, layout_of, split_into_buckets
from areal_sc.weights.published import BucketLayout

BROADCAST_BYTES = 50_000
GROUP_TIMEOUT_S = 30.0


class Trainer:
    """Rank 0 of a weight group, broadcasting from a thread as a trainer does."""

    def __init__(self, policies: Policies, name: str, num_ranks: int) -> None:
        self.policies = policies
        self.name = name
        self.cancelled = threading.Event()
        self.broadcaster = WeightBroadcaster(name, "127.0.0.1", "gloo", GROUP_TIMEOUT_S)
        self.num_ranks = num_ranks

    async def meet(self, engine: ServerEngine) -> None:
        group = self.broadcaster.describe(self.num_ranks)
        joined = asyncio.create_task(engine.join_group(group, first_rank=1))
        await asyncio.to_thread(self.broadcaster.meet, self.num_ranks)
        await joined

    def buckets(self, version: int) -> list[list[tuple[str, torch.Tensor]]]:
        return list(split_into_buckets(self.policies.named_tensors(version), BROADCAST_BYTES))

    def layouts(self, version: int) -> list[BucketLayout]:
        return [layout_of(bucket) for bucket in self.buckets(version)]

    async def receive(
        self, engine: ServerEngine, version: int, layouts: list[BucketLayout] | None = None
    ) -> None:
        """The engine's side of the broadcasts."""

        async def give_up() -> None:
            self.cancelled.set()

        await engine.update_weights_from_group(
            version,
            self.name,
            layouts or self.layouts(version),
            again=self.policies.source(version),
            give_up=give_up,
        )

    async def send(self, version: int) -> int:
        def send_all() -> int:
            return sum(
                self.broadcaster.broadcast(bucket, self.cancelled)
                for bucket in self.buckets(version)
            )

        return await asyncio.to_thread(send_all)
