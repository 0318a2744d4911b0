"""Simulated workers of benchmarks/many_workers.py: real sockets, answers after a while, no engine.

Run as `python many_workers_host.py FOLDER`, a role of planes_role.py. Workers of a node share one
heartbeat socket and one incarnation, so that any of them may speak for the others.
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

WORKERS_PER_NODE = 8
ROW_TOKENS = 8_000
UPDATE_S = (0.1, 0.5)
"""A weight update takes between these."""

Method = Callable[[dict[str, Any]], Awaitable[Any]]


class SimulatedWorker:
    """Either kind of worker; `address` is set once it is served."""

    def __init__(self, name: str, incarnation: str, group_s: tuple[float, float]) -> None:
        self.name = name
        self.address = ""
        self._incarnation = incarnation
        self._group_s = group_s
        self._sequence = itertools.count(1)
        self._last_sequence = 0

    def methods(self) -> dict[str, Method]:
        told = dict.fromkeys(("ping", "shutdown", "create_rendezvous"), _nothing)
        return told | {
            "initialize": self.initialize,
            "run_group": self.run_group,
            "update_weights": self.update_weights,
            "compute_logprobs": self.seal,
            "seal_weights": self.seal,
            "ppo_update": _update,
            "sweep": self.sweep,
        }

    async def initialize(self, args: dict[str, Any]) -> dict[str, Any]:
        """The place of a rank; of a rollout worker nobody reads it."""
        return {"data_rank": int(self.name.partition("/")[2]), "is_head": True}

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
            "shard_id": make_shard_id(self._incarnation, self._last_sequence),
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
    ) -> list[dict[str, str]]:
        """Their names, incarnations, nodes and addresses.

        Args:
            group_s: a group takes between these.
        """
        started = []
        for start in range(first, first + count, WORKERS_PER_NODE):
            incarnation = random_id()
            numbers = range(start, min(start + WORKERS_PER_NODE, first + count))
            names = [f"{role}/{number}" for number in numbers]
            beat_address = await self._serve(ours.beat_server(names, incarnation, self._folder))
            for name in names:
                worker = SimulatedWorker(name, incarnation, group_s)
                worker.address = await self._serve(
                    ours.rpc_server(name, incarnation, self._folder, worker.methods())
                )
                started.append(
                    {
                        "name": name,
                        "incarnation": incarnation,
                        "address": worker.address,
                        "beat_address": beat_address,
                        "node": f"{role}-node-{start}",
                    }
                )
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
