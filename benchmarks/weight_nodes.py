"""Nodes whose workers publish and pull weights: real data planes, no engines.

Run as `python weight_nodes.py FOLDER`, a role of planes_role.py. A process plays several nodes,
each with shared memory of its own. So what lies on another node, in this process or not, comes over
the bulk socket of that one, as between hosts.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import Any

import planes_ours as ours
import torch
from planes_role import serve_async
from simulated_workers import SimulatedWorker

from areal_sc.config.schema import TransportConfig
from areal_sc.ids import random_id
from areal_sc.nodes.spec import WorkerReport
from areal_sc.transport.plane import DataPlane
from areal_sc.transport.shards.memory_folder import ArenaFolder, memory_root
from areal_sc.weights import methods
from areal_sc.weights.adopter import HeldWeights
from areal_sc.weights.published import ShardReference, WeightsReference
from areal_sc.workers import calls

NUM_PARAMETERS = 16
STORE_BYTES = 64 << 20
"""What a rollout worker keeps free for rows; they are none here."""


def part_of(version: int, parameter: int, rank: int, numel: int) -> torch.Tensor:
    """[numel] float32: what a rank holds of a parameter."""
    return torch.full((numel,), float(1000 * version + 10 * parameter + rank))


class WeightWorker(SimulatedWorker):
    """Either kind of worker, with a data plane.

    Args:
        numel: of a rank's part of each parameter.
        num_ranks: of the trainers.
    """

    def __init__(
        self, name: str, plane: DataPlane, incarnation: str, numel: int, num_ranks: int
    ) -> None:
        super().__init__(name, incarnation, (0.0, 0.0), 0)
        self.plane = plane
        self._numel = numel
        self._num_ranks = num_ranks
        self._held = HeldWeights(plane)

    async def seal(self, args: Any) -> calls.SealedShard:
        """The part of rank i, which is called `train/i`."""
        rank = int(self.name.rpartition("/")[2])
        parts = {
            f"parameter-{number}": part_of(args.version, number, rank, self._numel)
            for number in range(NUM_PARAMETERS)
        }
        shard_id = self.plane.store.put(parts, [self._numel])
        shard = ShardReference(self.name, self.address, shard_id)
        return calls.SealedShard(shard, self.plane.store.last_sequence)

    async def sweep(self, sweep: calls.Sweep) -> int:
        self.plane.store.sweep(sweep.live, sweep.acknowledged, sweep.dead)
        return self.plane.store.last_sequence

    async def copy_weights(self, wanted: methods.CopyWeights) -> tuple[ShardReference, ...]:
        ids = await self._held.copy(wanted)
        return tuple(ShardReference(self.name, self.address, shard_id) for shard_id in ids)

    async def adopt_weights(self, weights: WeightsReference) -> None:
        """Reads and compares all values."""
        for number, (name, values) in enumerate(await self._held.read(weights)):
            expected = [part_of(weights.version, number, r, 1) for r in range(self._num_ranks)]
            for part, value in zip(values.split(self._numel), expected, strict=True):
                if not bool((part == value).all()):
                    raise ValueError(f"{name} arrived changed")
        self._held.keep_only(weights)


class Nodes:
    """The nodes of this process.

    Attributes:
        workers: of all of them.
    """

    def __init__(
        self,
        folder: Path,
        stack: contextlib.AsyncExitStack,
        worker_class: type[WeightWorker] = WeightWorker,
    ) -> None:
        self.workers: list[Any] = []
        self._folder = folder
        self._stack = stack
        self._worker_class = worker_class

    async def start(
        self, role: str, node: int, first: int, count: int, numel: int, num_ranks: int
    ) -> list[dict[str, str]]:
        """Starts a node with `count` workers; what is known of each, its node's agent included."""
        folder = self._folder
        root = memory_root("auto", folder, folder, needed_bytes=2 * STORE_BYTES) / f"{role}-{node}"
        root.mkdir(mode=0o700)
        arenas = ArenaFolder(root, self._folder.name)
        self._stack.callback(root.rmdir)
        self._stack.callback(arenas.remove)
        token, started = arenas.node_token(), []
        for number in range(first, first + count):
            worker = await self._worker(f"{role}/{number}", arenas, numel, num_ranks)
            started.append(WorkerReport(worker.name, worker.incarnation, worker.address, 1, token))
        agent = await self._serve(ours.agent_server(f"{role}-node-{node}", started, self._folder))
        return [
            {"name": w.name, "incarnation": w.incarnation, "address": w.address}
            | {"node": f"{role}-node-{node}", "agent": agent}
            for w in started
        ]

    def served_bytes(self) -> int:
        """Sent by the bulk servers of all workers, since the start."""
        return sum(worker.plane.stats().served_bytes for worker in self.workers)

    async def _worker(
        self, name: str, arenas: ArenaFolder, numel: int, num_ranks: int
    ) -> WeightWorker:
        keys = ours.keys_of(name, self._folder)
        transport = ours.ZmqTransport(client=ours.CurveClient.of_worker(keys))
        self._stack.push_async_callback(transport.close)
        incarnation = random_id()
        plane = DataPlane(
            name,
            incarnation,
            TransportConfig(),
            store_bytes=max(STORE_BYTES, 3 * 4 * numel * NUM_PARAMETERS),
            transport=transport,
            arenas=arenas,
            idle_buffer_bytes=0,
        )
        self._stack.push_async_callback(plane.close)
        worker = self._worker_class(name, plane, incarnation, numel, num_ranks)
        self.workers.append(worker)
        served = [*await plane.start(), *worker.methods()]
        worker.address = await self._serve(ours.rpc_server(name, incarnation, self._folder, served))
        return worker

    async def _serve(self, server: ours.RpcServer) -> str:
        address = await server.start()
        self._stack.push_async_callback(server.close)
        return address


async def main(folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        nodes = Nodes(folder, stack)
        await serve_async({"start": nodes.start, "served_bytes": nodes.served_bytes})


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1])))
