"""A worker's process as far as shared memory goes: it puts, sweeps, adopts and maps as it is told.

Run as `python arena_program.py ROOT RUN_ID WORKER INCARNATION`. Reads one JSON list a line, a
method of `Program` and its arguments, and answers each with one JSON line.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import re
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch

from areal_sc.errors import ShardGone
from areal_sc.transport.shards.arena_map import ArenaMap, MappedShard
from areal_sc.transport.shards.blocks import ArenaBackend
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import TensorStore

MIB = 1 << 20
ENOUGH = 300
_LINE = re.compile(r"(\w+\.\d+) (\d+)")


def rows_of(seed: int) -> list[int]:
    return [seed % 7, 0, seed * 37 % 5_000, 1]


def shard_of(seed: int) -> dict[str, torch.Tensor]:
    """[T] fields that anyone can compute; T differs from seed to seed."""
    ids = torch.arange(seed, seed + sum(rows_of(seed)), dtype=torch.int32)
    return {
        "ids": ids,
        "logprobs": ids.to(torch.bfloat16),
        "weights": (ids % 13).to(torch.float8_e4m3fn),
        "none": torch.zeros(0),
    }


def lengths_of(seed: int) -> dict[str, list[int]]:
    return {**dict.fromkeys(("ids", "logprobs", "weights"), rows_of(seed)), "none": []}


def is_intact(shard: MappedShard, seed: int) -> bool:
    """Whether it holds what was put."""
    return all(
        shard.tensor(name).dtype == expected.dtype
        and shard.fields[name].row_lengths == tuple(lengths_of(seed)[name])
        and torch.equal(shard.tensor(name).view(torch.uint8), expected.view(torch.uint8))
        for name, expected in shard_of(seed).items()
    )


class Program:
    def __init__(self, root: str, run_id: str, worker: str, incarnation: str) -> None:
        self.folder = ArenaFolder(Path(root), run_id)
        backend = ArenaBackend(self.folder, worker, incarnation)
        self.store = TensorStore(worker, incarnation, max_bytes=256 * MIB, backend=backend)
        self.arenas = ArenaMap(self.folder)
        self.held: dict[str, tuple[MappedShard, int]] = {}

    def put(self, seeds: list[int]) -> list[str]:
        return [self.store.put(shard_of(seed), lengths_of(seed)) for seed in seeds]

    def hold(self, shards: dict[str, int]) -> bool:
        """Maps shards, given with their seeds; whether all are intact."""
        self.held.update({name: (self.arenas.open_shard(name), n) for name, n in shards.items()})
        return self.are_held_intact()

    def are_held_intact(self) -> bool:
        return all(is_intact(shard, seed) for shard, seed in self.held.values())

    def drop(self) -> None:
        self.held.clear()

    def sweep_all(self) -> list[int]:
        """Bytes that are still held, and those of them that are mapped."""
        self.store.sweep([], self.store.last_sequence, adopted_live=[])
        return [self.store.num_bytes, self.store.mapped_retired_bytes]

    def adopt(self) -> list[int]:
        """How many shards were adopted, and how many there are now."""
        return [self.store.adopt(), self.store.num_shards]

    def put_half(self) -> None:
        """Leaves a block without a ticket, as a process does that dies while it puts."""
        self.unsealed = self.store._backend.allocate(ShardLayout(3 * MIB, {}))

    def fork(self) -> list[int]:
        """Starts two children that live on, and do away with all or nothing of what they inherit;
        their pids."""
        pids = []
        for drops in (True, False):
            is_done, tell = os.pipe()
            pids.append(os.fork())
            if pids[-1] == 0:
                if drops:
                    self.drop()  # must not release the locks of its parent
                    self.arenas.close()
                    self.store.close()  # must not delete the arena of its parent
                    self.folder.remove()
                os.write(tell, b"x")
                time.sleep(600)
                os._exit(0)
            os.read(is_done, 1)
        return pids

    def write_into(self, shard_id: str) -> None:
        """Is killed for it."""
        tensor = self.arenas.open_shard(shard_id).tensor("ids")
        ctypes.memset(tensor.data_ptr(), 0, 1)

    def produce(self, log: str, first: int, count: int) -> dict[str, Any]:
        """Three threads put shards and tell their ids in a file; a fourth one sweeps all but the
        newest."""
        fd = os.open(log, os.O_WRONLY | os.O_APPEND)
        done = threading.Event()

        def put(seeds: range) -> None:
            for seed in seeds:
                (shard_id,) = self.put([seed])
                os.write(fd, f"{shard_id} {seed}\n".encode())

        def sweep() -> None:
            is_last = False
            while not is_last:
                is_last = done.is_set()
                newest = self.store.last_sequence
                self.store.sweep(range(newest - 60, newest + 1), newest)

        sweeper = threading.Thread(target=sweep)
        threads = [
            threading.Thread(target=put, args=(range(first + i, first + count, 3),))
            for i in range(3)
        ]
        for thread in (sweeper, *threads):
            thread.start()
        for thread in threads:
            thread.join()
        done.set()
        sweeper.join()
        os.close(fd)
        return {"sealed": self.store.last_sequence, "bytes": self.store.num_bytes}

    def consume(self, log: str, seed: int, enough: str) -> dict[str, int]:
        """Opens what the file names, newest first, until it says END; holds the last 40, and looks
        at each again when it is let go, long after it was swept. There is a file `enough` once it
        has opened many, and some were gone."""
        rng = random.Random(seed)
        counts = {"mapped": 0, "gone": 0, "spoiled": 0}
        told: list[tuple[str, int]] = []
        held: deque[tuple[MappedShard, int]] = deque()
        unfinished = ""
        with open(log) as file:
            while True:
                # a line that crosses a page may come in two halves, or end with its killed writer
                *lines, unfinished = (unfinished + file.read()).split("\n")
                if "END" in lines:
                    break
                found = map(_LINE.fullmatch, lines)
                told += [(line[1], int(line[2])) for line in found if line is not None]
                if not told:
                    continue
                for _ in range(20):
                    back = min(len(told), int(rng.expovariate(1 / 30)) + 1)
                    shard_id, number = told[-back]
                    try:
                        held.append((self.arenas.open_shard(shard_id), number))
                    except ShardGone:
                        counts["gone"] += 1
                        continue
                    counts["mapped"] += 1
                    counts["spoiled"] += not is_intact(*held[-1])
                    if len(held) > 40:
                        shard, old = held.popleft()
                        counts["spoiled"] += not is_intact(shard, old)
                        del shard
                if counts["mapped"] > ENOUGH and counts["gone"]:
                    Path(enough).touch()
        counts["spoiled"] += sum(not is_intact(shard, number) for shard, number in held)
        return counts


def main(root: str, run_id: str, worker: str, incarnation: str) -> None:
    program = Program(root, run_id, worker, incarnation)
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        answer = getattr(program, method)(*arguments)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
