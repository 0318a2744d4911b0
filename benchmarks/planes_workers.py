"""The owner of shards and the puller that wants them, each a role of planes_role.py.

Run as `python planes_workers.py ROLE FOLDER`. Roles: `owner` (arena and bulk socket) and
`owner-encrypted`; pullers that reach one over TCP (`tcp`: pooled destinations, `tcp-fresh`,
`tcp-encrypted`) or through shared memory (`map`).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import convert, to_builtins
from planes_limits import MAX_SHARD_BYTES, pattern
from planes_ours import Worker, worker
from planes_payloads import PAYLOADS
from planes_role import Handlers, serve_async
from planes_samples import percentiles

from areal_sc.metadata import BatchMetadata

PULLERS = {
    "tcp": {"encrypt": False, "shares_memory": False},
    "tcp-fresh": {"encrypt": False, "shares_memory": False, "pools": False},
    "tcp-encrypted": {"encrypt": True, "shares_memory": False},
    "map": {"encrypt": False, "shares_memory": True},
}


def owner_handlers(owner: Worker) -> Handlers:
    store = owner.plane.store
    source = torch.from_numpy(pattern())
    made = {name: make() for name, make in PAYLOADS.items()}

    def shard_of(num_bytes: int) -> torch.Tensor:
        """[num_bytes / 4] float32: the pattern that all roles know."""
        return source[:num_bytes].view(torch.float32)

    def seal_shards(num_bytes: int, count: int) -> list[Any]:
        """One batch for each of `count` shards with one row of `num_bytes`."""
        values = shard_of(num_bytes)
        return [
            to_builtins(owner.seal([{"values": values}], [[values.numel()]])) for _ in range(count)
        ]

    def put_payload(payload: str) -> dict[str, Any]:
        """{"wire": the payload as one batch, "put_s"}."""
        shards = [
            {name: torch.from_numpy(values) for name, values in shard.items()}
            for shard in made[payload].shards
        ]
        start = time.perf_counter()
        batch = owner.seal(shards, made[payload].lengths)
        return {"put_s": time.perf_counter() - start, "wire": to_builtins(batch)}

    def drop(wires: list[list[Any]]) -> None:
        for wire in wires:
            for shard in convert(wire, BatchMetadata).shards:
                store.remove(shard.shard_id)

    def put(num_bytes: int, count: int) -> float:
        """Seconds for `count` puts; each shard is removed before the next one."""
        values, seconds = shard_of(num_bytes), 0.0
        for _ in range(count):
            start = time.perf_counter()
            shard_id = store.put({"values": values}, [values.numel()])
            seconds += time.perf_counter() - start
            store.remove(shard_id)
        return seconds

    return {
        "seal_shards": seal_shards,
        "drop": drop,
        "put": put,
        "put_payload": put_payload,
    }


class PullerHandlers:
    """Pulls of batches that were made known by a name."""

    def __init__(self, puller: Worker) -> None:
        self._puller = puller.plane.puller
        self._batches: dict[str, BatchMetadata] = {}
        self._destination = np.zeros(MAX_SHARD_BYTES, np.uint8)

    async def know(self, name: str, wire: list[Any], payload: str | None = None) -> None:
        """Pulls it once and compares every byte with what the owner was told to put."""
        batch = self._batches[name] = convert(wire, BatchMetadata)
        rows = await self._puller.pull(batch)
        if payload is None:
            num_bytes = rows.fields["values"].numel() * 4
            expected = {"values": torch.from_numpy(pattern(num_bytes)).view(torch.float32)}
        else:
            shards = PAYLOADS[payload]().shards
            expected = {
                field: torch.cat([torch.from_numpy(shard[field]) for shard in shards])
                for field in shards[0]
            }
        for field, values in expected.items():
            if not torch.equal(rows.fields[field].view(torch.uint8), values.view(torch.uint8)):
                raise ValueError(f"{name}: {field} arrived changed")

    async def pull(self, name: str, count: int = 1, copies_out: bool = False) -> float:
        """Seconds for `count` pulls, one after the other.

        Args:
            copies_out: the one field to a warm place, where a pull gives a view of shared memory.
        """
        batch = self._batches[name]
        start = time.perf_counter()
        for _ in range(count):
            rows = await self._puller.pull(batch)
            if copies_out:
                self._copy_out(rows.fields["values"])
        return time.perf_counter() - start

    async def first_pull(self, wire: list[Any]) -> tuple[float, float]:
        """Seconds of the pull, and with copying out, of a shard that was never pulled before."""
        batch = convert(wire, BatchMetadata)
        start = time.perf_counter()
        values = (await self._puller.pull(batch)).fields["values"]
        pulled_s = time.perf_counter() - start
        self._copy_out(values)
        return pulled_s, time.perf_counter() - start

    async def pull_new(self, wire: list[Any], by_row: bool = False) -> float:
        """Seconds of pulling a batch that was never pulled before.

        Args:
            by_row: one row after the other, so that nothing need be joined: a view for each.
        """
        batch = convert(wire, BatchMetadata)
        parts = _single_rows(batch) if by_row else [batch]
        start = time.perf_counter()
        for part in parts:
            await self._puller.pull(part)
        return time.perf_counter() - start

    async def latencies(self, name: str, count: int) -> dict[str, float]:
        """Of pulls of one row, one at a time, and their sum."""
        rows, seconds = _single_rows(self._batches[name]), []
        for number in range(count):
            start = time.perf_counter()
            await self._puller.pull(rows[number % len(rows)])
            seconds.append(time.perf_counter() - start)
        return {**percentiles(seconds), "sum_s": sum(seconds)}

    async def pipelined(self, name: str, count: int, max_inflight: int) -> float:
        """Seconds for `count` pulls of one row each, `max_inflight` at a time."""
        rows = _single_rows(self._batches[name])
        wanted = iter(range(count))

        async def pull_next(numbers: Iterator[int]) -> None:
            for number in numbers:
                await self._puller.pull(rows[number % len(rows)])

        start = time.perf_counter()
        await asyncio.gather(*(pull_next(wanted) for _ in range(max_inflight)))
        return time.perf_counter() - start

    def _copy_out(self, values: torch.Tensor) -> None:
        source = values.view(torch.uint8).numpy()
        np.copyto(self._destination[: source.size], source)


def _single_rows(batch: BatchMetadata) -> list[BatchMetadata]:
    return [batch.take([row]) for row in range(batch.total_batch_size)]


async def main(role: str, folder: Path) -> None:
    if role.startswith("owner"):
        is_encrypted = role == "owner-encrypted"
        async with worker(f"{role}/0", folder, encrypt=is_encrypted, shares_memory=True) as owner:
            await serve_async(owner_handlers(owner))
    else:
        async with worker(f"{role}/0", folder, **PULLERS[role]) as puller:
            await serve_async(PullerHandlers(puller))


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(sys.argv[1], Path(sys.argv[2])))
