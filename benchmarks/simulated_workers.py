"""Simulated workers: real sockets, answers at once or after a while, no engine.

Run as `python simulated_workers.py FOLDER`, a role of planes_role.py. Each node has an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import planes_ours as ours
from planes_role import serve_async

from areal_sc.engines.base import RankPosition
from areal_sc.ids import random_id
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.nodes.spec import WorkerReport
from areal_sc.token_fields import TRAJECTORY_FIELDS
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.ids import make_shard_id
from areal_sc.weights import methods
from areal_sc.weights.published import ShardReference, WeightsReference
from areal_sc.workers import calls, rank_methods

WORKERS_PER_NODE = 8
LAUNCH_PACE_S = 0.005
"""Between two launches: a few processes shake hands for all workers, on the controllers' cores."""
TOKENS_PER_VERSION = 16_384
"""A row that takes longer to generate was sampled by more policy versions."""
UPDATE_S = (0.1, 0.5)
"""A weight update takes between these."""


@dataclass
class SimulatedWorker:
    """Either kind of worker.

    Attributes:
        group_s: a group takes between these seconds.
        row_tokens: length of a row; 0: the index of its prompt.
        address: set once it is served.
    """

    name: str
    incarnation: str
    group_s: tuple[float, float]
    row_tokens: int
    address: str = ""
    last_sequence: int = 0

    def methods(self) -> list[Served]:
        return [
            calls.PING.served_by(_nothing),
            calls.SHUTDOWN.served_by(_nothing),
            calls.SWEEP.served_by(self.sweep),
            calls.ADOPTED_SHARDS.served_by(_none),
            calls.INITIALIZE_ENGINE.served_by(_nothing),
            calls.RUN_GROUP.served_by(self.run_group),
            methods.ADOPT_WEIGHTS.served_by(self.adopt_weights),
            methods.COPY_WEIGHTS.served_by(self.copy_weights),
            rank_methods.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            rank_methods.INITIALIZE_RANK.served_by(self.initialize),
            rank_methods.COMPUTE.served_by(self.seal),
            methods.SEAL_WEIGHTS.served_by(self.seal),
            rank_methods.TRY_LOSS.served_by(_none),
            rank_methods.UPDATE.served_by(_update),
        ]

    async def create_rendezvous(self, _: None) -> str:
        return ""

    async def initialize(self, rank: rank_methods.InitializeRank) -> RankPosition:
        return RankPosition(rank.rank, is_head=True)

    async def run_group(self, group: calls.RunGroup) -> calls.GroupReply:
        await asyncio.sleep(random.uniform(*self.group_s))
        num_rows, version = group.group_size, group.admitted_version
        length = self.row_tokens or group.prompt.index
        num_spans = min(8, 1 + length // TOKENS_PER_VERSION)
        rows = tuple(
            RowMetadata(
                group_id=group.group_id,
                attempt=group.attempt,
                sequence_length=length,
                reward=random.random(),
                admitted_version=version,
                version_spans=tuple((version + i, length // num_spans) for i in range(num_spans)),
                episode=episode,
            )
            for episode in range(num_rows)
        )
        sealed = await self.seal(group)
        shard = ShardMetadata(*sealed.shard, runs=(RowRun(0, 0, num_rows),))
        columns = Columns(dict(TRAJECTORY_FIELDS), (shard,))
        batch = BatchMetadata(random_id(), version, (columns,), rows)
        return calls.GroupReply(
            calls.GroupAttempt(group.group_id, group.attempt),
            batch,
            metrics={"accuracy": (4.0, num_rows)},
        )

    async def adopt_weights(self, _: WeightsReference) -> None:
        await asyncio.sleep(random.uniform(*UPDATE_S))

    async def copy_weights(self, _: methods.CopyWeights) -> tuple[ShardReference, ...]:
        await asyncio.sleep(random.uniform(*UPDATE_S))
        return ((await self.seal(None)).shard,)

    async def seal(self, _: Any) -> calls.SealedShard:
        self.last_sequence += 1
        shard_id = make_shard_id(self.incarnation, self.last_sequence)
        shard = ShardReference(self.name, self.address, shard_id)
        return calls.SealedShard(shard, self.last_sequence)

    async def sweep(self, _: calls.Sweep) -> int:
        return self.last_sequence


async def _none(_: None) -> tuple[str, ...]:
    return ()


async def _nothing(_: Any) -> None: ...


async def _update(_: rank_methods.Update) -> dict[str, float]:
    return {"loss": 0.0, "entropy": 0.0, "grad_norm": 0.0}


async def start(
    folder: Path,
    stack: contextlib.AsyncExitStack,
    role: str,
    first: int,
    count: int,
    group_s: tuple[float, float] = (0.0, 0.0),
    row_tokens: int = 0,
) -> list[dict[str, str]]:
    """Starts `count` workers, 8 a node; what is known of each, its node's agent included."""

    async def serve(server: ours.RpcServer) -> str:
        address = await server.start()
        stack.push_async_callback(server.close)
        return address

    started = []
    for start in range(first, first + count, WORKERS_PER_NODE):
        node, of_node = f"{role}-node-{start}", []
        for number in range(start, min(start + WORKERS_PER_NODE, first + count)):
            worker = SimulatedWorker(f"{role}/{number}", random_id(), group_s, row_tokens)
            worker.address = await serve(
                ours.rpc_server(worker.name, worker.incarnation, folder, worker.methods())
            )
            of_node.append(WorkerReport(worker.name, worker.incarnation, worker.address, 1, node))
        agent = ours.agent_server(node, of_node, folder, start * LAUNCH_PACE_S)
        address = await serve(agent)
        started += [
            {"name": w.name, "incarnation": w.incarnation, "address": w.address}
            | {"node": node, "agent": address}
            for w in of_node
        ]
    return started


async def main(folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await serve_async({"start": partial(start, folder, stack)})


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
