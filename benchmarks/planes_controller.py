"""A controller and the simulated workers that it steers, each a role of planes_role.py.

Run as `python planes_controller.py ROLE FOLDER`. Roles: `host`, which serves any number of workers
by real control sockets, and `controller`. Controller CPU is that of its whole process, ZMQ's I/O
thread included.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import planes_ours as ours
from msgspec.structs import replace
from planes_role import Handlers, process_cpu_s, resident_bytes, serve_async, tcp_bytes
from planes_samples import percentiles

from areal_sc.ids import random_id
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    Columns,
    PromptReference,
    RowMetadata,
    Run,
    ShardMetadata,
    concat,
)
from areal_sc.weights import ShardReference
from areal_sc.workers import calls
from areal_sc.workers.operations import Operation

WORKERS_PER_NODE = 8
HEARTBEAT_WARM_UP_S = 2.5
"""Longer than the interval of heartbeats."""
GROUP_SIZE = 8
NUM_MINIBATCHES = 4
LAG_PROBE_S = 0.002
TOKENS_PER_VERSION = 16_384
"""A row that takes longer to generate was sampled by more policy versions."""


def group_metadata(address: str, num_rows: int, length: int) -> BatchMetadata:
    """What a rollout worker says of one group of finished trajectories."""
    spans = min(8, 1 + length // TOKENS_PER_VERSION)
    row = RowMetadata(
        group_id=123_456,
        attempt=0,
        sequence_length=length,
        reward=0.5,
        admitted_version=1_000,
        version_spans=tuple((1_000 + i, length // spans) for i in range(spans)),
        episode=0,
    )
    rows = [replace(row, episode=episode) for episode in range(num_rows)]
    shard = ShardMetadata(
        node_id="rollout/0",
        node_addr=address,
        shard_id=f"{random_id()}.1",
        runs=(Run(0, 0, num_rows),),
    )
    columns = Columns(dict(TRAJECTORY_FIELDS), (shard,))
    return BatchMetadata(random_id(), 0, (columns,), tuple(rows))


class Host:
    """Simulated workers: real control sockets, handlers that answer at once."""

    def __init__(self, folder: Path, stack: contextlib.AsyncExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def handlers(self) -> Handlers:
        return {"start": self.start}

    async def start(self, first: int, count: int) -> list[dict[str, str]]:
        """Starts `count` workers, 8 a node; what is known of each, its node's agent included."""
        started = []
        for start in range(first, first + count, WORKERS_PER_NODE):
            of_node = []
            for number in range(start, min(start + WORKERS_PER_NODE, first + count)):
                name, incarnation = f"rollout/{number}", random_id()
                server = ours.rpc_server(name, incarnation, self._folder, _METHODS)
                address = await self._serve(server)
                of_node.append(
                    {"name": name, "incarnation": incarnation, "address": address}
                    | {"node": f"node{start}"}
                )
            agent = ours.agent_server(
                f"node{start}", list(map(ours.report_of, of_node)), self._folder
            )
            address = await self._serve(agent)
            started += [worker | {"agent": address} for worker in of_node]
        return started

    async def _serve(self, server: ours.RpcServer) -> str:
        address = await server.start()
        self._stack.push_async_callback(server.close)
        return address


async def _run_group(group: calls.RunGroup) -> calls.GroupReply:
    length = group.prompt.index  # nobody reads the prompt here
    return calls.GroupReply(group_metadata("tcp://10.0.0.1:50000", group.group_size, length))


async def _compute_logprobs(batch: BatchMetadata) -> calls.SealedShard:
    shard = ShardReference("train/0", "tcp://10.0.0.2:50000", f"{random_id()}.2")
    return calls.SealedShard(shard, 2)


async def _update(update: calls.PPOUpdate) -> dict[str, float]:
    return {"loss": 0.0, "entropy": 0.0, "grad_norm": 0.0}


_METHODS = [
    calls.RUN_GROUP.served_by(_run_group),
    calls.COMPUTE_LOGPROBS.served_by(_compute_logprobs),
    calls.PPO_UPDATE.served_by(_update),
]


class Controller:
    """Connections to all workers, and what a controller does with them."""

    def __init__(self, folder: Path) -> None:
        self._transport = ours.ZmqTransport(authenticator=ours.authenticator(folder))
        self._workers: list[dict[str, str]] = []
        self._connections: list[ours.Connection] = []

    def handlers(self) -> Handlers:
        return {
            "connect": self.connect,
            "latencies": self.latencies,
            "fan_out": self.fan_out,
            "watch": self.watch,
            "steps": self.steps,
        }

    async def close(self) -> None:
        await self._transport.close()

    async def connect(self, workers: list[dict[str, str]]) -> None:
        """Connects to these workers too, and waits until all answer."""
        self._workers += workers
        self._connections += [
            self._transport.connect(worker["address"], worker["name"], worker["incarnation"])
            for worker in workers
        ]
        await ours.noop_all(self._transport, self._connections)

    async def latencies(self, count: int) -> dict[str, float]:
        """Of no-op calls of the first worker, one at a time."""
        call, seconds = self._connections[0].call, []
        for _ in range(count):
            start = time.perf_counter()
            await call(ours.NOOP, None, timeout_s=ours.CALL_TIMEOUT_S)
            seconds.append(time.perf_counter() - start)
        return percentiles(seconds)

    async def fan_out(self, num_workers: int) -> dict[str, float]:
        """{"cpu_s", "wall_s"} of calling that many workers at once and getting every reply."""
        called = self._connections[:num_workers]
        cpu, wall = process_cpu_s(), time.perf_counter()
        await ours.noop_all(self._transport, called)
        return {"cpu_s": process_cpu_s() - cpu, "wall_s": time.perf_counter() - wall}

    async def watch(self, seconds: float, num_fan_outs: int) -> dict[str, float]:
        """{"cpu_share", "p50_s", "p99_s", "max_s"} while the heartbeats of all workers come in.

        The share is that of a core, over `seconds`. The latencies say how late a timer of the event
        loop fires: for `seconds` more, or while so many fan-outs to all workers follow each other.

        Raises: RuntimeError: a worker was taken for lost.
        """
        lost: list[str] = []
        watching = asyncio.create_task(
            ours.heartbeats(self._transport, self._workers, lambda error: lost.append(str(error)))
        )
        try:
            await asyncio.sleep(HEARTBEAT_WARM_UP_S)  # every node is connected to
            cpu, wall = process_cpu_s(), time.perf_counter()
            await asyncio.sleep(seconds)
            share = (process_cpu_s() - cpu) / (time.perf_counter() - wall)
            async with _lag_probe() as late:  # it would cost more CPU than the heartbeats
                if not num_fan_outs:
                    await asyncio.sleep(seconds)
                for _ in range(num_fan_outs):
                    await self.fan_out(len(self._connections))
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
        if lost:
            raise RuntimeError(f"{len(lost)} workers were taken for lost: {lost[0]}")
        return {"cpu_share": share, **percentiles(late), "max_s": max(late)}

    async def steps(self, num_rows: int, length: int, count: int) -> dict[str, float]:
        """{"bytes_per_row", "resident_bytes"} of training steps, without tensors.

        A step's messages: a group's call and metadata (one of the rows' first pass), the log-prob
        and update calls to two ranks with their replies.
        """
        await self._step(num_rows, length)  # connections and caches
        before = sum(tcp_bytes())
        for _ in range(count):
            await self._step(num_rows, length)
        num_bytes = sum(tcp_bytes()) - before
        gc.collect()
        return {
            "bytes_per_row": num_bytes / (count * num_rows),
            "resident_bytes": float(resident_bytes()),
        }

    async def _step(self, num_rows: int, length: int) -> None:
        rollout, ranks = self._connections[0], self._connections[1:3]
        groups = []
        for number in range(num_rows // GROUP_SIZE):
            reply = await rollout.call(
                calls.RUN_GROUP,
                calls.RunGroup(number, 0, 1_000, PromptReference(0, length, 0), 0, GROUP_SIZE),
                timeout_s=ours.CALL_TIMEOUT_S,
            )
            assert reply.batch is not None
            groups.append(reply.batch)
        batch = concat(groups, batch_id=random_id(), global_step=1_000)
        parts = batch.select(["input_ids"]).split(len(ranks))
        replies = await asyncio.gather(
            *(
                rank.call(calls.COMPUTE_LOGPROBS, part, timeout_s=ours.CALL_TIMEOUT_S)
                for rank, part in zip(ranks, parts, strict=True)
            )
        )
        proximal = concat(
            [_sealed_part(part, reply.shard) for part, reply in zip(parts, replies, strict=True)],
            batch_id=random_id(),
            global_step=1_000,
        )
        # the split is by tokens: row order differs between the two, as it does in a run
        order = itertools.chain.from_iterable(batch.partition(len(ranks)))
        position = {row: i for i, row in enumerate(order)}
        whole = batch.union(proximal.take([position[row] for row in range(num_rows)]))
        whole = whole.with_advantages([0.25] * num_rows)
        minibatches = [part.split(len(ranks)) for part in whole.split(NUM_MINIBATCHES, "episodes")]
        await asyncio.gather(
            *(
                rank.call(
                    calls.PPO_UPDATE,
                    calls.PPOUpdate(
                        Operation(1, 1_000, "ppo_update"), tuple(parts[i] for parts in minibatches)
                    ),
                    timeout_s=ours.CALL_TIMEOUT_S,
                )
                for i, rank in enumerate(ranks)
            )
        )


def _sealed_part(part: BatchMetadata, sealed: ShardReference) -> BatchMetadata:
    """The part with the one field that its rank has sealed."""
    shard = ShardMetadata(*sealed, runs=(Run(0, 0, part.total_batch_size),))
    return replace(part, columns=(Columns({"proximal_logprobs": "float32"}, (shard,)),))


@asynccontextmanager
async def _lag_probe() -> AsyncIterator[list[float]]:
    """Collects by how much a short timer of this loop is late."""
    late: list[float] = []

    async def probe() -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LAG_PROBE_S
            await asyncio.sleep(LAG_PROBE_S)
            late.append(loop.time() - due)

    task = asyncio.create_task(probe())
    try:
        yield late
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def main(role: str, folder: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        if role == "host":
            await serve_async(Host(folder, stack).handlers())
        else:
            controller = Controller(folder)
            stack.push_async_callback(controller.close)
            await serve_async(controller.handlers())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
