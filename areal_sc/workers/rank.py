"""What the operations of a rank work with: its engine, its place among the ranks, its store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import torch

from areal_sc.engines.base import RankPosition, TrainEngine
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.nodes.spec import WorkerSpec
from areal_sc.records.spans import START_UP
from areal_sc.weights.published import ShardReference
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.base import Worker
from areal_sc.workers.operations import Operations

A = TypeVar("A")
T = TypeVar("T")
Work = Callable[[A], Coroutine[Any, Any, T]]


class Rank(Worker):
    """One rank of a model.

    Attributes:
        operations: those that change its state; see `operations`.
        position: its share of the rows, once it has joined the others.
        number: among all ranks.
        world_size: of all ranks; 0 until it has joined them.
        num_computed: times that it was asked to compute a field of rows.
        num_computing: of these calls, those that go on.
    """

    handle: TrainHandle

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        self.engine: TrainEngine = self.handle.build()
        self.engine.shares_files = self.files.are_shared
        self.engine.node = self.node
        self.operations = Operations(spec.name)
        self.position = RankPosition(0, is_head=True)
        self.number = self.world_size = 0
        self.num_computed = self.num_computing = 0
        self._is_asleep = False  # in the engine's thread
        self._num_using, self._is_unused = 0, asyncio.Event()

    async def compute(self, function: Callable[[], T]) -> T:
        """Result of a function in the engine's thread; an engine that sleeps wakes first."""

        def awake() -> T:
            if self._is_asleep:
                self.engine.wake()
                self._is_asleep = False
            return function()

        return await super().compute(awake)

    async def sleep(self, _: None) -> None:
        """The engine gives up the memory of its device until it has to compute.

        What a controller has given up, and goes on, comes first.
        """
        while self._num_using:
            await self._is_unused.wait()

        def sleep() -> None:
            if self.world_size and not self._is_asleep:
                self.engine.sleep()
                self._is_asleep = True

        await super().compute(sleep)

    def using(self, work: Work[A, T]) -> Work[A, T]:
        """The same method of the rank, which uses the engine: `sleep` waits for its end."""

        async def use(args: A) -> T:
            self._num_using += 1
            self._is_unused.clear()
            try:
                return await work(args)
            finally:
                self._num_using -= 1
                if not self._num_using:
                    self._is_unused.set()

        return use

    async def join_ranks(self, args: rank_methods.InitializeRank) -> RankPosition:
        """Meets the other ranks, and loads the model."""
        torch.set_num_threads(1)  # of this thread, which computes nothing; the engine has its own
        self.operations.lineage = args.lineage
        with self.recorder.span(START_UP):
            self.position = await self.compute(
                lambda: self.engine.initialize(args.rank, args.world_size, args.init_method)
            )
        self.number, self.world_size = args.rank, args.world_size
        return self.position

    def sealed(self, shard_id: str) -> calls.SealedShard:
        """A shard of its store, as its reply tells of it."""
        shard = ShardReference(self.spec.name, self.address, shard_id)
        return calls.SealedShard(shard, self.plane.store.last_sequence)
