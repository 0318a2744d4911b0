"""What the operations of a rank work with: its engine, its place among the ranks, its store."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from areal_sc.engines.base import ManyRanks, RankPosition, TrainEngine
from areal_sc.engines.handle_base import TrainHandle
from areal_sc.nodes.spec import WorkerSpec
from areal_sc.weights import ShardReference
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.base import Worker
from areal_sc.workers.operations import Operations


class Published(NamedTuple):
    """Weights that a rank has sealed.

    Attributes:
        policy: (lineage, version).
        whole, changes: ids of shards; "" where there are no changes.
    """

    policy: tuple[int, int]
    whole: str
    changes: str


class Rank(Worker):
    """One rank of a model.

    Attributes:
        operations: those that change its state; see `operations`.
        position: its share of the rows, once it has joined the others.
        number: among all ranks.
        weights_root: `weight_update.folder`, for method `disk`.
        published: what this life of it has sealed last.
        world_size: of all ranks; 0 until it has joined them.
        num_computed: times that it was asked to compute a field of rows.
        num_computing: of these calls, those that go on.
    """

    handle: TrainHandle

    def __init__(self, spec: WorkerSpec, agent: int) -> None:
        super().__init__(spec, agent)
        self.engine: TrainEngine = self.handle.build()
        if isinstance(self.engine, ManyRanks):
            self.engine.shares_files = self.files.are_shared
            self.engine.node = self.node
        self.operations = Operations(spec.name)
        self.position = RankPosition(0, is_head=True)
        self.number = self.world_size = 0
        self.weights_root = Path(self.handle.config.weight_update.folder).absolute()
        self.published: Published | None = None
        self.num_computed = self.num_computing = 0

    async def join_ranks(self, args: rank_methods.InitializeRank) -> RankPosition:
        """Meets the other ranks, and loads the model."""
        torch.set_num_threads(1)  # of this thread, which computes nothing; the engine has its own
        self.operations.lineage = args.lineage
        self.position = await self.compute(
            lambda: self.engine.initialize(args.rank, args.world_size, args.init_method)
        )
        self.number, self.world_size = args.rank, args.world_size
        return self.position

    def sealed(self, shard_id: str) -> calls.SealedShard:
        """A shard of its store, as its reply tells of it."""
        shard = ShardReference(self.spec.name, self.address, shard_id)
        return calls.SealedShard(shard, self.plane.store.last_sequence)
