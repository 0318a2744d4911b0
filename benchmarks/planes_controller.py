"""A controller that steers simulated workers, a role of planes_role.py.

Run as `python planes_controller.py FOLDER`. Its CPU is that of the whole process, ZMQ's I/O thread
included.
"""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import planes_ours as ours
from planes_role import process_cpu_s, resident_bytes, serve_async, tcp_bytes
from planes_samples import LagProbe, percentiles

from areal_sc.controller.train.rank_layout import RankLayout, with_sealed_field
from areal_sc.ids import random_id
from areal_sc.metadata import PromptReference, concat
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.operations import Kind, Operation

HEARTBEAT_WARM_UP_S = 2.5
"""Longer than the interval of heartbeats."""
GROUP_SIZE = 8
LAYOUT = RankLayout((0, 1), (0, 1))
NUM_MINIBATCHES = 4
FIRST_GROUP = 123_456
"""As late in a run, where the numbers of groups take more bytes."""


class Controller:
    """Connections to all workers, and what a controller does with them."""

    def __init__(self, folder: Path) -> None:
        self._transport = ours.ZmqTransport(client=ours.controller(folder))
        self._workers: list[dict[str, str]] = []
        self._connections: list[ours.Connection] = []

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
        probe = LagProbe()
        heartbeats = ours.heartbeats(self._transport, self._workers, lost)
        tasks = [asyncio.create_task(heartbeats)]
        try:
            await asyncio.sleep(HEARTBEAT_WARM_UP_S)  # every node is connected to
            cpu, wall = process_cpu_s(), time.perf_counter()
            await asyncio.sleep(seconds)
            share = (process_cpu_s() - cpu) / (time.perf_counter() - wall)
            # only now: the probe would cost more CPU than the heartbeats
            tasks.append(asyncio.create_task(probe.run()))
            if not num_fan_outs:
                await asyncio.sleep(seconds)
            for _ in range(num_fan_outs):
                await self.fan_out(len(self._connections))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if lost:
            raise RuntimeError(f"{len(lost)} workers were taken for lost: {lost[0]}")
        return {"cpu_share": share, **percentiles(probe.late_s), "max_s": max(probe.late_s)}

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
        rollout, *ranks = self._connections[: 1 + LAYOUT.num_shares]
        groups = []
        for number in range(FIRST_GROUP, FIRST_GROUP + num_rows // GROUP_SIZE):
            group = calls.RunGroup(number, 0, 1_000, PromptReference(0, length, 0), 0, GROUP_SIZE)
            (reply,) = await _call_each([rollout], calls.RUN_GROUP, [group])
            groups.append(reply.batch)
        batch = concat(groups, batch_id=random_id(), global_step=1_000)
        shares = LAYOUT.split(batch, NUM_MINIBATCHES)
        share_rows = [list(chain.from_iterable(share)) for share in shares]
        read, field = batch.select(["input_ids"]), "proximal_logprobs"
        parts = [rank_methods.Compute(read.take(rows), "logprobs", field) for rows in share_rows]
        replies = await _call_each(ranks, rank_methods.COMPUTE, parts)
        shards = [reply.shard for reply in replies]
        whole = with_sealed_field(batch, field, share_rows, shards)
        whole = whole.with_advantages([0.25] * num_rows)
        operation = Operation(1, 1_000, Kind.update)
        updates = [
            rank_methods.Update(operation, 0, tuple(map(whole.take, share)), advances=False)
            for share in shares
        ]
        await _call_each(ranks, rank_methods.UPDATE, updates)


async def _call_each(
    workers: Sequence[ours.Connection], method: ours.Method, arguments: Sequence[Any]
) -> list[Any]:
    """The reply of each worker, all called at once."""
    pairs = zip(workers, arguments, strict=True)
    timeout_s = ours.CALL_TIMEOUT_S
    return await asyncio.gather(*(w.call(method, a, timeout_s=timeout_s) for w, a in pairs))


async def main(folder: Path) -> None:
    controller = Controller(folder)
    try:
        await serve_async(controller)
    finally:
        await controller.close()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
