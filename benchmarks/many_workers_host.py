"""Simulated workers of benchmarks/many_workers.py: real sockets, answers after a while, no engine.

Run as `python many_workers_host.py FOLDER`, a role of planes_role.py. Each node has an agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import planes_ours as ours
from planes_role import Handlers, serve_async

from areal_sc.batch_wire import batch_to_wire
from areal_sc.ids import random_id
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
)
from areal_sc.transport.shard_ids import make_shard_id
from areal_sc.workers.spec import WorkerReport

WORKERS_PER_NODE = 8
LAUNCH_PACE_S = 0.005
"""Between two launches: a few processes shake hands for all workers, on the controllers' cores."""
ROW_TOKENS = 8_000
UPDATE_S = (0.1, 0.5)
"""A weight update takes between these."""

Method = Callable[[dict[str, Any]], Awaitable[Any]]


class SimulatedWorker:
    """Either kind of worker; `address` is set once it is served."""

    def __init__(self, name: str, incarnation: str, group_s: tuple[float, float]) -> None:
        self.name = name
        self.address = ""
        self.incarnation = incarnation
        self._group_s = group_s
        self._sequence = itertools.count(1)
        self._last_sequence = 0

    def methods(self) -> dict[str, Method]:
        told = dict.fromkeys(("ping", "initialize", "shutdown", "create_rendezvous"), _nothing)
        return told | {
            "run_group": self.run_group,
            "update_weights": self.update_weights,
            "compute_logprobs": self.seal,
            "seal_weights": self.seal,
            "ppo_update": _update,
            "sweep": self.sweep,
        }

    async def run_group(self, args: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(random.uniform(*self._group_s))
        num_rows, version = args["group_size"], args["admitted_version"]
        rows = tuple(
            RowMetadata(
                group_id=args["group_id"],
                attempt=args["attempt"],
                sequence_length=ROW_TOKENS,
                reward=random.random(),
                admitted_version=version,
                version_spans=((version, ROW_TOKENS),),
            )
            for _ in range(num_rows)
        )
        sealed = await self.seal(args)
        shard = ShardMetadata(
            node_id=sealed["node_id"],
            node_addr=sealed["node_addr"],
            shard_id=sealed["shard_id"],
            batch_size=num_rows,
            offset=0,
            fields={
                name: TensorMetadata((num_rows * ROW_TOKENS,), dtype)
                for name, dtype in TRAJECTORY_FIELDS.items()
            },
            shard_rows=tuple(range(num_rows)),
        )
        batch = BatchMetadata(random_id(), version, num_rows, (shard,), rows)
        return {"batch": batch_to_wire(batch), "rejected": {}, "metrics": {"accuracy": [4.0, 8]}}

    async def update_weights(self, args: dict[str, Any]) -> None:
        await asyncio.sleep(random.uniform(*UPDATE_S))

    async def seal(self, args: dict[str, Any]) -> dict[str, Any]:
        self._last_sequence = next(self._sequence)
        return {
            "node_id": self.name,
            "node_addr": self.address,
            "shard_id": make_shard_id(self.incarnation, self._last_sequence),
            "sequence": self._last_sequence,
        }

    async def sweep(self, args: dict[str, Any]) -> dict[str, int]:
        return {"last_sequence": self._last_sequence}


async def _nothing(args: dict[str, Any]) -> None: ...


async def _update(args: dict[str, Any]) -> dict[str, float]:
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
