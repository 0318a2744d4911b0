"""A training step as a run takes it: TrainController, RPC, a train worker that pulls its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path

from process_cpu import cpu_seconds, worker_pids

from areal_sc import FSDPPPOActor, TrainController, make_scheduler, start
from areal_sc.config.schema import ActorConfig, SchedulerConfig, TransportConfig
from areal_sc.controller.control_loop import ControlLoop
from areal_sc.errors import WorkerLost
from areal_sc.ids import random_id
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    Columns,
    RowMetadata,
    Run,
    ShardMetadata,
)
from areal_sc.transport.bulk.server import BulkServer
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.transport.rpc.server import RpcServer
from areal_sc.transport.security.curve import CurveAuthenticator
from areal_sc.transport.security.keys import RunKeys
from areal_sc.transport.shards.store import TensorStore
from areal_sc.weights import WeightGroup, WeightsReference
from areal_sc.workers.calls import WeightRanks

GROUP_SIZE = 8


class RowSource:
    """Serves given rows as a rollout worker serves what it generated: one shard a group.

    It is also where new weights go, and pulls none. Its server shares the controllers' event loop.
    """

    worker_lost: WorkerLost | None = None
    measures_free_memory = False

    def __init__(self, rows: PackedRows, keys: RunKeys) -> None:
        incarnation = random_id()
        self._rows = rows
        self._store = TensorStore("rollout/0", incarnation, max_bytes=1 << 30)
        self._bulk = BulkServer(self._store)
        self._server = RpcServer(
            self._bulk.methods(),
            node_id="rollout/0",
            incarnation=incarnation,
            authenticator=CurveAuthenticator(keys, "rollout/0"),
        )
        self._address = ""

    def attach(self, control_loop: ControlLoop | None) -> None:
        pass

    async def start_async(self) -> None:
        await self._bulk.start()
        self._address = await self._server.start()

    async def close_async(self) -> None:
        await self._server.close()
        await self._bulk.close()

    async def hold_updates_async(self) -> int:
        return 0

    async def wait_for_weights_async(self) -> None:
        pass

    async def weight_ranks_async(self, group: str) -> list[WeightRanks]:
        return []

    async def join_weight_group_async(self, group: WeightGroup, first_ranks: Sequence[int]) -> None:
        pass

    async def leave_weight_group_async(self, group: str) -> None:
        pass

    def receive_weights(
        self, weights: WeightsReference, trained_rows: Iterable[RowMetadata] = ()
    ) -> None:
        pass

    def seal(self) -> BatchMetadata:
        """The rows as a batch; the reward of each is the advantage that it came with."""
        rows = self._rows
        groups = [
            range(first, min(first + GROUP_SIZE, rows.num_rows))
            for first in range(0, rows.num_rows, GROUP_SIZE)
        ]
        return BatchMetadata(
            batch_id=random_id(),
            global_step=0,
            columns=(
                Columns(
                    dict(TRAJECTORY_FIELDS), tuple(self._seal_group(group) for group in groups)
                ),
            ),
            rows=_row_metadata(rows),
        )

    def _seal_group(self, group: range) -> ShardMetadata:
        part = self._rows.take(group)
        return ShardMetadata(
            node_id="rollout/0",
            node_addr=self._address,
            shard_id=self._store.put(part.fields, part.lengths),
            runs=(Run(group.start, 0, part.num_rows),),
        )


class ControllerSide:
    """A started TrainController with a batch to train on, again and again."""

    def __init__(self, actor: TrainController, source: RowSource) -> None:
        self._actor = actor
        self._source = source
        self._batch = source.seal()

    def step(self) -> None:
        batch = self._actor.compute_advantages(self._batch)
        batch = self._actor.compute_proximal_logprobs(batch)
        self._actor.ppo_update(batch)

    def publish(self) -> None:
        """Ends the policy version: the worker seals its weights and forgets the step's shards."""
        self._actor.publish_weights(self._source)

    def cpu_s(self) -> float:
        """CPU seconds so far of this process and the train worker."""
        return sum(cpu_seconds(worker_pids(self._actor)).values())


@contextmanager
def controller_side(
    config: ActorConfig, rows: PackedRows, run_dir: Path
) -> Iterator[ControllerSide]:
    """Starts the train worker of a side that trains on the rows, in their order; ends it after."""
    scheduler = make_scheduler(SchedulerConfig(run_dir=str(run_dir), transport=TransportConfig()))
    try:
        actor = TrainController(FSDPPPOActor(config), scheduler)
        source = RowSource(rows, scheduler.keys)
        with start(source, actor):
            yield ControllerSide(actor, source)
    finally:
        scheduler.close()


def _row_metadata(rows: PackedRows) -> tuple[RowMetadata, ...]:
    assert rows.advantages is not None
    bounds = pairwise(accumulate(rows.lengths, initial=0))
    mask = rows.fields["loss_mask"]
    return tuple(
        RowMetadata(
            group_id=row // GROUP_SIZE,
            attempt=0,
            sequence_length=end - begin,
            reward=rows.advantages[row],
            admitted_version=0,
            version_spans=((0, int(mask[begin:end].sum())),),
            episode=row % GROUP_SIZE,
        )
        for row, (begin, end) in enumerate(bounds)
    )
