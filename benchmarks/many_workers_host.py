"""Simulated workers of benchmarks/many_workers.py: real sockets, answers after a while, no engine.

Run as `python many_workers_host.py FOLDER`, a role of planes_role.py. Each node has an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from pathlib import Path
from typing import Any

import planes_ours as ours
from planes_role import Handlers, serve_async

from areal_sc.engines.base import RankPlace
from areal_sc.ids import random_id
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    Columns,
    RowMetadata,
    Run,
    ShardMetadata,
)
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.ids import make_shard_id
from areal_sc.weights import ShardReference, WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.spec import WorkerReport

WORKERS_PER_NODE = 8
LAUNCH_PACE_S = 0.005
"""Between two launches: a few processes shake hands for all workers, on the controllers' cores."""
ROW_TOKENS = 8_000
UPDATE_S = (0.1, 0.5)
"""A weight update takes between these."""


class SimulatedWorker:
    """Either kind of worker; `address` is set once it is served."""

    def __init__(self, name: str, incarnation: str, group_s: tuple[float, float]) -> None:
        self.name = name
        self.address = ""
        self.incarnation = incarnation
        self._group_s = group_s
        self._sequence = itertools.count(1)
        self._last_sequence = 0

    def methods(self) -> list[Served]:
        return [
            calls.PING.served_by(_nothing),
            calls.SHUTDOWN.served_by(_nothing),
            calls.SWEEP.served_by(self.sweep),
            calls.INITIALIZE_ENGINE.served_by(_nothing),
            calls.RUN_GROUP.served_by(self.run_group),
            calls.UPDATE_WEIGHTS.served_by(self.update_weights),
            calls.CREATE_RENDEZVOUS.served_by(self.create_rendezvous),
            calls.INITIALIZE_RANK.served_by(self.initialize),
            calls.COMPUTE_LOGPROBS.served_by(self.seal),
            calls.SEAL_WEIGHTS.served_by(self.seal),
            calls.PPO_UPDATE.served_by(_update),
        ]

    async def create_rendezvous(self, _: None) -> str:
        return ""

    async def initialize(self, rank: calls.InitializeRank) -> RankPlace:
        return RankPlace(rank.rank, is_head=True)

    async def run_group(self, group: calls.RunGroup) -> calls.GroupReply:
        await asyncio.sleep(random.uniform(*self._group_s))
        num_rows, version = group.group_size, group.admitted_version
        rows = tuple(
            RowMetadata(
                group_id=group.group_id,
                attempt=group.attempt,
                sequence_length=ROW_TOKENS,
                reward=random.random(),
                admitted_version=version,
                version_spans=((version, ROW_TOKENS),),
                episode=episode,
            )
            for episode in range(num_rows)
        )
        sealed = await self.seal(group)
        shard = ShardMetadata(*sealed.shard, runs=(Run(0, 0, num_rows),))
        columns = Columns(dict(TRAJECTORY_FIELDS), (shard,))
        batch = BatchMetadata(random_id(), version, (columns,), rows)
        return calls.GroupReply(batch, metrics={"accuracy": (4.0, num_rows)})

    async def update_weights(self, _: WeightsReference) -> None:
        await asyncio.sleep(random.uniform(*UPDATE_S))

    async def seal(self, _: Any) -> calls.SealedShard:
        self._last_sequence = next(self._sequence)
        shard_id = make_shard_id(self.incarnation, self._last_sequence)
        return calls.SealedShard(
            ShardReference(self.name, self.address, shard_id), self._last_sequence
        )

    async def sweep(self, _: calls.Sweep) -> int:
        return self._last_sequence


async def _nothing(_: Any) -> None: ...


async def _update(_: calls.PPOUpdate) -> dict[str, float]:
    return {"loss": 0.0}


class Host:
    """Starts simulated workers."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def handlers(self) -> Handlers:
        return {"start": self.start}

    async def start(
        self, role: str, first: int, count: int, group_s: tuple[float, float]
    ) -> dict[str, str]:
        """The address of each node's agent, by the node's name.

        Args:
            group_s: a group takes between these.
        """
        started = {}
        for start in range(first, first + count, WORKERS_PER_NODE):
            node, of_node = f"{role}-node-{start}", []
            for number in range(start, min(start + WORKERS_PER_NODE, first + count)):
                worker = SimulatedWorker(f"{role}/{number}", random_id(), group_s)
                worker.address = await self._serve(
                    ours.rpc_server(worker.name, worker.incarnation, self._folder, worker.methods())
                )
                of_node.append(
                    WorkerReport(worker.name, worker.incarnation, worker.address, 1, node)
                )
            agent = ours.agent_server(node, of_node, self._folder, start * LAUNCH_PACE_S)
            started[node] = await self._serve(agent)
        return started

    async def _serve(self, server: ours.RpcServer) -> str:
        address = await server.start()
        self._stack.push_async_callback(server.close)
        return address


async def main(folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        await serve_async(Host(folder, stack).handlers())


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
