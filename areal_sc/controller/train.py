"""TrainController: steers the ranks of one FSDP engine; sees rows only as metadata.

    consumes       batches (metadata) from a RolloutController, or any other source of rows
    per step       proximal log-probabilities (recomputed by the ranks, sealed as new shards)
                   -> advantages (scalars of the rows' metadata, computed here)
                   -> PPO minibatches, each split over the ranks by tokens
    publishes      policy version i+1, by pull, broadcast or disk; see `publication`

Minibatches are cut from the whole batch before the split over ranks, so what one optimizer update
trains on does not depend on the number of ranks.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal_sc.algorithms.advantages import normalized_advantages
from areal_sc.batch_wire import batch_to_wire
from areal_sc.config.plain import to_plain
from areal_sc.config.schema import ActorConfig, ClipCenter
from areal_sc.controller.control_loop import Shell
from areal_sc.controller.fleet import Fleet
from areal_sc.controller.publication import WRITE_TIMEOUT_S, Publisher, WeightsReceiver
from areal_sc.controller.runtime import Runtime
from areal_sc.engines.base import EngineHandle
from areal_sc.errors import CheckpointError, WorkerLost
from areal_sc.metadata import (
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
    WeightsReference,
    concat,
)
from areal_sc.schedulers.base import LaunchRequest, Scheduler
from areal_sc.workflows.base import Prompts
from areal_sc.workflows.sources import SourceRegistry

LOGPROB_FIELDS = ("input_ids",)
PPO_FIELDS = ("input_ids", "loss_mask", "behavior_logprobs", "versions")


class TrainController(Shell):
    """Trains one model on any number of ranks.

    Methods block; each has an awaitable twin, named `..._async`, for scripts that are asyncio
    themselves or run on a simulated loop.

    Attributes:
        version: policy version = number of published training steps.
    """

    def __init__(
        self, engine: EngineHandle, scheduler: Scheduler, *, runtime: Runtime | None = None
    ) -> None:
        self.engine = engine
        self.config: ActorConfig = engine.config
        self.scheduler = scheduler
        self.version = 0
        self._owns_transport = runtime is None
        self._runtime = runtime or Runtime.create(scheduler.keys)
        self._fleet = Fleet(scheduler, self._runtime, on_lost=self._note_loss)
        self._sources = SourceRegistry(Path(scheduler.config.run_dir))
        self._trained_rows: list[RowMetadata] = []
        self._publisher = Publisher(self.config, self._fleet, self._runtime.new_id)
        self._num_writes = 0

    async def start_async(self) -> None:
        """Starts the ranks and builds the engine in each.

        Raises: WorkerStartError, ModelError: with the worker's own words.
        """
        world_size = self.config.num_workers
        await self._fleet.launch(
            [
                LaunchRequest(
                    role="train",
                    index=index,
                    engine=type(self.engine).__name__,
                    engine_config=to_plain(self.config),
                    device=self.config.device,
                    store_bytes=self.config.store_bytes,
                )
                for index in range(world_size)
            ]
        )
        init_method = ""
        if world_size > 1:  # one rank alone opens no port for it
            init_method = await self._fleet.call(self._fleet.members[0], "create_rendezvous", {})
        await self._fleet.call_all(
            "initialize",
            [
                {"rank": rank, "world_size": world_size, "init_method": init_method}
                for rank in range(world_size)
            ],
        )

    async def close_async(self) -> None:
        """Ends the workers."""
        await self._fleet.close()
        if self._owns_transport:
            await self._runtime.transport.close()

    @property
    def num_bytes(self) -> int:
        """Bytes on this controller's sockets so far."""
        return self._fleet.num_bytes

    async def compute_proximal_logprobs_async(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with field `proximal_logprobs`: [T] float32, nats, of the current weights.

        With `ppo.clip_center: behavior` there is nothing to compute and the batch is returned.
        """
        if self.config.ppo.clip_center == ClipCenter.behavior:
            return batch
        rank_rows = self._rows_by_rank(batch)
        selected = batch.select(LOGPROB_FIELDS)  # a rank may have no rows, and then has no fields
        parts, args = [], []
        for rows in rank_rows:
            await asyncio.sleep(0)  # of thousands of rows: the loop has a turn between two of them
            parts.append(selected.take(rows))
            args.append({"batch": batch_to_wire(parts[-1])})
        replies = await self._fleet.call_all("compute_logprobs", args)
        results = [
            self._with_shard(part, reply, "proximal_logprobs")
            for part, reply in zip(parts, replies, strict=True)
        ]
        joined = concat(
            [result.select(["proximal_logprobs"]) for result in results if result.rows],
            batch_id=self._runtime.new_id(),
            global_step=batch.global_step,
        )
        await asyncio.sleep(0)
        position = {row: i for i, row in enumerate(row for rows in rank_rows for row in rows)}
        in_batch_order = joined.take([position[row] for row in range(batch.total_batch_size)])
        return batch.union(in_batch_order)

    def compute_advantages(self, batch: BatchMetadata) -> BatchMetadata:
        """The batch with one advantage per row, from the rows' rewards and groups."""
        ppo = self.config.ppo
        advantages = normalized_advantages(
            [row.reward for row in batch.rows],
            [row.group_id for row in batch.rows],
            mean=ppo.advantage_mean,
            std=ppo.advantage_std,
            eps=ppo.advantage_eps,
        )
        return batch.with_advantages([float(a) for a in advantages])

    async def ppo_update_async(self, batch: BatchMetadata) -> dict[str, float]:
        """One optimizer update per PPO minibatch.

        Returns: metrics of the step, over all ranks (loss, entropy, grad_norm, ...).
        """
        fields: tuple[str, ...] = PPO_FIELDS
        if self.config.ppo.clip_center == ClipCenter.proximal:
            fields = (*fields, "proximal_logprobs")
        selected = batch.select(fields)
        num_minibatches = min(self.config.ppo.num_minibatches, batch.total_batch_size)
        by_rank = []
        for rows in selected.partition(num_minibatches, "rows"):
            minibatch = selected.take(rows)
            parts = []
            for part in minibatch.partition(self.config.num_workers):
                await asyncio.sleep(0)  # of thousands of rows: the loop has a turn between two
                parts.append(batch_to_wire(minibatch.take(part)))
            by_rank.append(parts)
        replies = await self._call_once(
            "ppo_update",
            [
                {"minibatches": [parts[rank] for parts in by_rank]}
                for rank in range(self.config.num_workers)
            ],
        )
        self._trained_rows += batch.rows
        return dict(replies[0])

    async def sft_update_async(self, prompts: Prompts, indices: Sequence[int]) -> dict[str, float]:
        """One optimizer update on rows of a dataset with items `{"input_ids", "loss_mask"}`.

        The workers read the rows; only their numbers travel. There is nothing to publish, so the
        version advances at once.
        """
        dataset = self._sources.register_prompts(prompts)
        num_workers = self.config.num_workers
        replies = await self._call_once(
            "sft_update",
            [
                {"dataset": dataset, "indices": list(indices[rank::num_workers])}
                for rank in range(num_workers)
            ],
        )
        self.version += 1
        return dict(replies[0])

    async def publish_weights_async(self, rollout: WeightsReceiver) -> None:
        """Publishes the weights as version + 1, in the way that `weight_update.method` names.

        Returns once the weights are sealed, broadcast or written; generation goes on. An update
        to the version before that is still going on is waited for.
        """

        def announce(weights: WeightsReference) -> None:
            self.version = weights.version
            trained_rows, self._trained_rows = self._trained_rows, []
            rollout.receive_weights(weights, trained_rows)

        await self._publisher.publish(self.version + 1, rollout, announce)

    async def share_weights_async(self, rollout: WeightsReceiver) -> None:
        """Gives the current version to rollout workers that hold another one (after a resume)."""
        await self._publisher.publish(self.version, rollout, rollout.receive_weights)

    async def save_hf_async(self, folder: str | Path) -> None:
        """Writes the model and its tokenizer in Hugging Face layout; replaces `folder`.

        Raises: CheckpointError: the disk is full, say; an existing folder is left as it was.
        """
        write, exported = await self._begin_write("begin_save_hf", {})
        await self._finish_export(write, exported, Path(folder))

    def begin_save_hf(self, folder: str | Path) -> Future[None]:
        """`save_hf` beside training: returns once the ranks have copied their weights."""
        write, exported = self._run(self._begin_write("begin_save_hf", {}))
        return self._submit(self._finish_export(write, exported, Path(folder)))

    async def save_snapshot_async(self) -> None:
        """Writes weights, optimizer, schedule and RNG to `engine` of an unfinished snapshot.

        `areal_sc.trainer.recovery` adds the controllers' state and gives it its final name.

        Raises: CheckpointError: earlier snapshots are left as they were.
        """
        write, _ = await self._begin_write("begin_snapshot", {"step": self.version})
        await self._finish_write(write)

    def begin_snapshot(self) -> Future[None]:
        """`save_snapshot` beside training: returns once the ranks have copied their state."""
        write, _ = self._run(self._begin_write("begin_snapshot", {"step": self.version}))
        return self._submit(self._finish_write(write))

    async def load_snapshot_async(self, step: int) -> None:
        """Goes back to the snapshot of that step; `version` becomes `step`.

        Raises: CheckpointError: it cannot be read.
        """
        await self._fleet.call_all("load_snapshot", [{"step": step}] * self.config.num_workers)
        self.version = step

    @property
    def publication_stats(self) -> dict[str, float]:
        """Where the time of publications went; see `PublicationTimes`."""
        return self._publisher.times.as_stats()

    async def worker_stats_async(self) -> list[dict[str, float]]:
        """Counters of each rank's store and data plane."""
        return await self._fleet.call_all("stats", [{}] * self.config.num_workers)

    def worker_stats(self) -> list[dict[str, float]]:
        return self._run(self.worker_stats_async())

    def compute_proximal_logprobs(self, batch: BatchMetadata) -> BatchMetadata:
        return self._run(self.compute_proximal_logprobs_async(batch))

    def ppo_update(self, batch: BatchMetadata) -> dict[str, float]:
        return self._run(self.ppo_update_async(batch))

    def sft_update(self, prompts: Prompts, indices: Sequence[int]) -> dict[str, float]:
        return self._run(self.sft_update_async(prompts, indices))

    def publish_weights(self, rollout: WeightsReceiver) -> None:
        self._run(self.publish_weights_async(rollout))

    def share_weights(self, rollout: WeightsReceiver) -> None:
        self._run(self.share_weights_async(rollout))

    def save_hf(self, folder: str | Path) -> None:
        self._run(self.save_hf_async(folder))

    def save_snapshot(self) -> None:
        self._run(self.save_snapshot_async())

    def load_snapshot(self, step: int) -> None:
        self._run(self.load_snapshot_async(step))

    def _rows_by_rank(self, batch: BatchMetadata) -> list[list[int]]:
        """The rows that each rank will train on, so that its log-probabilities stay with it."""
        num_minibatches = min(self.config.ppo.num_minibatches, batch.total_batch_size)
        rank_rows: list[list[int]] = [[] for _ in range(self.config.num_workers)]
        for minibatch in batch.partition(num_minibatches, "rows"):
            parts = batch.take(minibatch).partition(self.config.num_workers)
            for rows, part in zip(rank_rows, parts, strict=True):
                rows += [minibatch[row] for row in part]
        return rank_rows

    def _with_shard(
        self, part: BatchMetadata, reply: Mapping[str, Any], field: str
    ) -> BatchMetadata:
        """The part, held as `field` by the shard that the rank sealed for its rows."""
        num_rows = part.total_batch_size
        if num_rows == 0:
            return replace(part, shards=())
        shard = ShardMetadata(
            node_id=reply["node_id"],
            node_addr=reply["node_addr"],
            shard_id=reply["shard_id"],
            batch_size=num_rows,
            offset=0,
            fields={field: TensorMetadata((part.num_tokens,), "float32")},
            shard_rows=tuple(range(num_rows)),
        )
        return replace(part, shards=(shard,))

    async def _call_once(self, method: str, args: Sequence[dict[str, Any]]) -> list[Any]:
        """A state-changing call: the worker runs the operation once and answers repeats."""
        operation = self._runtime.new_id()
        stamped = [
            {**arg, "operation": operation, "expected_version": self.version} for arg in args
        ]
        return await self._fleet.call_all(method, stamped)

    async def _begin_write(self, method: str, args: dict[str, Any]) -> tuple[int, Any]:
        """Number of the write, and what rank 0 says about it, once all ranks have copied."""
        self._num_writes += 1
        call = {**args, "write": self._num_writes}
        replies = await self._fleet.call_all(
            method, [call] * self.config.num_workers, timeout_s=WRITE_TIMEOUT_S
        )
        return call["write"], replies[0]

    async def _finish_write(self, write: int) -> None:
        calls = [{"write": write}] * self.config.num_workers
        await self._fleet.call_all("finish_write", calls, timeout_s=WRITE_TIMEOUT_S)

    async def _finish_export(self, write: int, exported: str, folder: Path) -> None:
        await self._finish_write(write)
        await asyncio.to_thread(_replace_folder, Path(exported), folder)

    def _note_loss(self, loss: WorkerLost) -> None:
        self.worker_lost = self.worker_lost or loss


def _replace_folder(source: Path, target: Path) -> None:
    retired = target.with_name(target.name + ".old")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(retired, ignore_errors=True)
        if target.exists():
            target.rename(retired)
        shutil.move(source, target)
    except OSError as error:
        if retired.exists():
            shutil.rmtree(target, ignore_errors=True)
            retired.rename(target)
        raise CheckpointError(f"cannot write {target}: {error}") from error
    shutil.rmtree(retired, ignore_errors=True)
    with suppress(OSError):
        source.parent.rmdir()  # unless another export is being written
