"""Kills a rollout worker while some episodes of a group have ended, and others are held."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from integration.scripts.episodes import EndsSome

from areal_sc import GRPOConfig, LocalGenerator, RolloutController, Workflow
from areal_sc.metadata import BatchMetadata
from areal_sc.schedulers.base import Scheduler
from areal_sc.transport.shards.arena_map import ArenaMap
from areal_sc.transport.shards.memory_folder import ArenaFolder

NOTED = {"input_ids": np.int32, "loss_mask": np.bool_, "behavior_logprobs": np.float32}

Row = tuple[bytes, ...]
"""The bytes of each noted field."""


@dataclass
class Kills:
    """What came of some kills.

    Attributes:
        num_played: episodes that workers have played to their end.
        num_needed: episodes of the batch.
        played: rows that workflows gave.
        sealed: rows of the batch, as they lie in the worker's store.
        before_kill: rows that workflows gave before the worker was killed.
        took_s: of each kill, until its group was complete.
        num_left: shards in the store beside those of the batch.
        shared_bytes: of the values that groups share, as they lie in the worker's store.
    """

    num_played: int = 0
    num_needed: int = 0
    played: Counter[Row] = field(default_factory=Counter)
    sealed: Counter[Row] = field(default_factory=Counter)
    before_kill: Counter[Row] = field(default_factory=Counter)
    took_s: list[float] = field(default_factory=list)
    num_left: int = 0
    shared_bytes: int = 0

    def check(self) -> None:
        """Nothing that had ended was played again, and all of it is in the batch, bit for bit."""
        assert self.num_played == self.num_needed
        assert self.sealed == self.played
        assert not self.before_kill - self.sealed


async def kill_at(
    config: GRPOConfig,
    scheduler: Scheduler,
    played: Workflow,
    free: Sequence[int],
    path: Path,
    **row: Any,
) -> Kills:
    """One batch, of a group for each of `free`; its worker is killed when so many have ended.

    Args:
        config: `rollout.max_concurrent_groups` is 1, `max_staleness` 0, and `train_batch_groups`
            the number of groups.
        path: of the rows that the workflow gives; it does not exist.
        row: what each row of the dataset has, too.
    """
    workflow, size, kills = EndsSome(played, str(path)), config.rollout.group_size, Kills()
    rows = [{"prompt": f"{chr(97 + n % 26) * (1 + n // 26)}", **row} for n in range(len(free))]
    rows = [it | {"num_free": k, "answer": "a"} for it, k in zip(rows, free, strict=True)]
    names = {it["prompt"]: it["num_free"] for it in rows}
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    try:
        await rollout.start_async()
        batch = asyncio.create_task(rollout.prepare_batch_async(rows, workflow))
        for done in range(len(free)):
            group = await _until(lambda d=done: _running(rollout, d), batch)
            name = rows[group.prompt.index]["prompt"]
            await _played(rollout, done * size + names[name], batch)
            kills.before_kill += _noted(path)
            began_s = time.perf_counter()
            os.kill(rollout.fleet.members[0].worker.pid, signal.SIGKILL)
            path.with_name(f"{path.name}.{name}").touch()
            await _played(rollout, (done + 1) * size, batch)
            kills.took_s.append(time.perf_counter() - began_s)
        formed = await batch
        kills.num_played = int(await _num_played(rollout))
        kills.num_needed = len(formed.episodes)
        kills.played = _noted(path)
        folder = ArenaFolder(*_memory_of(rollout))
        arenas = ArenaMap(folder)
        kills.sealed = _sealed(formed, arenas)
        of_groups = [shard for columns in formed.columns[1:] for shard in columns.shards]
        tensors = [arenas.open_shard(shard.shard_id).tensor("page") for shard in of_groups]
        kills.shared_bytes = sum(it.nbytes for it in tensors)
        folder.close()
        (stats,) = await rollout.worker_stats_async()
        kills.num_left = int(stats["store_shards"]) - len(formed.shards)
        kills.before_kill = Counter(set(kills.before_kill))
    finally:
        await rollout.close_async()
    return kills


def _running(rollout: RolloutController, num_done: int) -> Any:
    """The group after so many others, once it runs."""
    groups = list(rollout.groups.ledger.unconsumed())
    running = [group for group in groups if group.state == "running"]
    num_finished = sum(group.state == "finished" for group in groups)
    return running[0] if running and num_finished == num_done else None


async def _until(find: Any, batch: asyncio.Task[BatchMetadata]) -> Any:
    while (found := find()) is None:
        if batch.done():
            batch.result()
        await asyncio.sleep(0.02)
    return found


async def _played(
    rollout: RolloutController, num_episodes: int, batch: asyncio.Task[BatchMetadata]
) -> None:
    """Returns when the worker has ended so many episodes in all of its lives."""
    while await _num_played(rollout) < num_episodes and not batch.done():  # noqa: ASYNC110
        await asyncio.sleep(0.02)


async def _num_played(rollout: RolloutController) -> float:
    (stats,) = await rollout.worker_stats_async()
    return stats.get("episodes_played", 0.0)


def _memory_of(rollout: RolloutController) -> tuple[Path, str]:
    """Root and run id of the shared memory, from the path of a worker's arena."""
    incarnation = rollout.fleet.members[0].worker.incarnation
    root = Path("/dev/shm")
    (arena,) = root.glob(f"areal-sc-*/*/rollout-0.{incarnation}")
    return root, arena.parent.name


def _noted(path: Path) -> Counter[Row]:
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [json.loads(line) for line in lines]
    return Counter(tuple(np.array(r[n], t).tobytes() for n, t in NOTED.items()) for r in rows)


def _sealed(batch: BatchMetadata, arenas: ArenaMap) -> Counter[Row]:
    rows: Counter[Row] = Counter()
    for shard in batch.columns[0].shards:
        held = arenas.open_shard(shard.shard_id)
        bounds = np.cumsum([0, *held.fields["input_ids"].row_lengths])
        for first, last in pairwise(bounds):
            rows[tuple(held.tensor(n)[first:last].numpy().tobytes() for n in NOTED)] += 1
    return rows
