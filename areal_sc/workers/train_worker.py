"""One rank of the trained model, as a process: pulls rows, computes, seals what it made."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from areal_sc.batch_wire import batch_from_wire
from areal_sc.engines.base import TrainEngine
from areal_sc.errors import StaleCall
from areal_sc.run_folder import RunFolder
from areal_sc.transport.interface import host_of
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.base import Method, Worker
from areal_sc.workers.spec import WorkerSpec
from areal_sc.workers.weight_publication import WeightPublication

logger = logging.getLogger(__name__)


class TrainWorker(Worker):
    """Serves a `TrainEngine`.

    State-changing calls name an operation and the policy version that they expect: an operation
    runs once, a repeat gets the stored reply, and one meant for another version is refused.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.engine: TrainEngine = self.handle.build()
        self.version = 0
        self._last_operation: tuple[str, Any] | None = None
        self._writes: dict[int, Future[None]] = {}
        self._publication: WeightPublication | None = None

    def methods(self) -> dict[str, Method]:
        return super().methods() | {
            "create_rendezvous": self.create_rendezvous,
            "initialize": self.initialize,
            "compute_logprobs": self.compute_logprobs,
            "ppo_update": self.ppo_update,
            "sft_update": self.sft_update,
            "seal_weights": self.seal_weights,
            "save_weights": self.save_weights,
            "open_weight_group": self.open_weight_group,
            "meet_weight_group": self.meet_weight_group,
            "weight_layouts": self.weight_layouts,
            "broadcast_weights": self.broadcast_weights,
            "cancel_broadcast": self.cancel_broadcast,
            "begin_save_hf": self.begin_save_hf,
            "begin_snapshot": self.begin_snapshot,
            "finish_write": self.finish_write,
            "load_snapshot": self.load_snapshot,
        }

    @property
    def publication(self) -> WeightPublication:
        assert self._publication, "the controller calls initialize first"
        return self._publication

    async def close(self) -> None:
        if self._publication:
            self._publication.close()
        await self.compute(self.engine.close)

    async def create_rendezvous(self, args: dict[str, Any]) -> str:
        """Rank 0 hosts the ranks' meeting point on a port of the system's choice."""
        return await self.compute(self.engine.create_rendezvous)

    async def initialize(self, args: dict[str, Any]) -> None:
        """Joins the other ranks and builds the model."""
        torch.set_num_threads(self.handle.config.num_threads)
        rank, world_size = int(args["rank"]), int(args["world_size"])
        init_method = str(args["init_method"])
        await self.compute(lambda: self.engine.initialize(rank, world_size, init_method))
        self._publication = WeightPublication(
            self.engine,
            self.plane.store,
            self.handle.config.weight_update,
            self.compute,
            is_root=rank == 0,
            host=host_of(self.address),
        )

    async def compute_logprobs(self, args: dict[str, Any]) -> dict[str, Any]:
        """Seals `proximal_logprobs` of the batch's rows."""
        batch = batch_from_wire(args["batch"])
        rows = await self.plane.puller.pull(batch)

        def compute() -> str:
            logprobs = self.engine.compute_logprobs(rows)
            if not rows.num_rows:
                return ""
            return self.plane.store.put({"proximal_logprobs": logprobs}, rows.lengths)

        return self._shard_reply(await self.compute(compute))

    async def ppo_update(self, args: dict[str, Any]) -> dict[str, float]:
        """One optimizer update per minibatch."""

        async def update() -> dict[str, float]:
            batches = [batch_from_wire(wire) for wire in args["minibatches"]]
            minibatches = [await self.plane.puller.pull(batch) for batch in batches]
            min_token_version = batches[0].min_token_version
            return await self.compute(
                lambda: self.engine.ppo_update(
                    minibatches, step=self.version, min_token_version=min_token_version
                )
            )

        return await self._once(args, update)

    async def sft_update(self, args: dict[str, Any]) -> dict[str, float]:
        """One optimizer update on rows of a dataset."""

        async def update() -> dict[str, float]:
            dataset = self.sources.prompts(int(args["dataset"]))
            items = [dataset[int(index)] for index in args["indices"]]
            rows = PackedRows(
                {
                    "input_ids": _packed([item["input_ids"] for item in items], torch.int32),
                    "loss_mask": _packed([item["loss_mask"] for item in items], torch.bool),
                },
                tuple(len(item["input_ids"]) for item in items),
            )
            stats = await self.compute(lambda: self.engine.sft_update(rows, step=self.version))
            self.version += 1
            return stats

        return await self._once(args, update)

    async def seal_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        """Seals this rank's part of every parameter; the policy version becomes `version`."""
        reply = self._shard_reply(await self.publication.seal())
        self.version = int(args["version"])
        return reply

    async def save_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        """Writes the weights to `weight_update.folder`; the policy version becomes `version`.

        Returns: the `folder`, and the `sequence` number of the newest shard in the store.
        """
        folder = await self.publication.save(int(args["version"]), int(args["oldest"]))
        self.version = int(args["version"])
        return {"folder": folder, "sequence": self.plane.store.last_sequence}

    async def open_weight_group(self, args: dict[str, Any]) -> dict[str, Any]:
        """Rank 0 listens for the ranks of a weight group; see `WeightPublication`."""
        return await self.publication.open_group(
            str(args["name"]),
            int(args["world_size"]),
            is_cuda=bool(args["is_cuda"]),
            devices=[str(device) for device in args["devices"]],
        )

    async def meet_weight_group(self, args: dict[str, Any]) -> None:
        await self.publication.meet_group(int(args["world_size"]))

    async def weight_layouts(self, args: dict[str, Any]) -> list[Any]:
        return await self.publication.layouts()

    async def broadcast_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        return await self.publication.broadcast()

    async def cancel_broadcast(self, args: dict[str, Any]) -> None:
        """Also called by rollout workers, whose servers have refused."""
        self.publication.cancel_broadcast(str(args["group"]))

    async def begin_save_hf(self, args: dict[str, Any]) -> str:
        """Takes the weights for a Hugging Face folder below the run folder; returns its path."""
        number = int(args["write"])
        folder = Path(self.spec.run_dir) / "exports" / str(number)
        begun = await self.compute(lambda: self.engine.begin_save_hf(folder))
        self._writes[number] = begun
        return str(folder)

    async def begin_snapshot(self, args: dict[str, Any]) -> None:
        """Takes this rank's part of a snapshot that the controller completes."""
        folder = self._snapshot_folder(args, ".partial")
        begun = await self.compute(lambda: self.engine.begin_snapshot(folder))
        self._writes[int(args["write"])] = begun

    async def finish_write(self, args: dict[str, Any]) -> None:
        """Replies when what the write took is on the disk. The engine trains meanwhile.

        Raises: CheckpointError: it could not be written.
        """
        # A call that is given up must not cancel the write, which other ranks take part in.
        await asyncio.shield(asyncio.wrap_future(self._writes.pop(int(args["write"]))))

    async def load_snapshot(self, args: dict[str, Any]) -> None:
        """Goes back to a snapshot."""
        folder = self._snapshot_folder(args)
        await self.compute(lambda: self.engine.load_snapshot(folder))
        self.version = int(args["step"])

    def _snapshot_folder(self, args: dict[str, Any], suffix: str = "") -> Path:
        name = RunFolder(self.spec.run_dir).snapshot_path(int(args["step"])).name
        return RunFolder(self.spec.run_dir).checkpoints / (name + suffix) / "engine"

    def _shard_reply(self, shard_id: str) -> dict[str, Any]:
        return {
            "node_id": self.spec.name,
            "node_addr": self.address,
            "shard_id": shard_id,
            "sequence": self.plane.store.last_sequence,
        }

    async def _once(
        self, args: dict[str, Any], operation: Callable[[], Awaitable[dict[str, float]]]
    ) -> dict[str, float]:
        name, expected = str(args["operation"]), int(args["expected_version"])
        if self._last_operation and self._last_operation[0] == name:
            stored: dict[str, float] = self._last_operation[1]
            return stored
        if expected != self.version:
            raise StaleCall(
                f"operation {name} on {self.spec.name}: expected policy version {expected}, "
                f"the worker is at {self.version} (pid {os.getpid()})"
            )
        result = await operation()
        self._last_operation = (name, result)
        return result


def _packed(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(
        [torch.as_tensor(row, dtype=dtype) for row in values] or [torch.empty(0, dtype=dtype)]
    )
