"""One rank of the trained model, as a process: pulls rows, computes, seals what it made."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from areal_sc.algorithms.named_loss import CROSS_ENTROPY, loss_of
from areal_sc.batch_wire import batch_from_wire
from areal_sc.durable import partial_of
from areal_sc.engines.base import RankPlace, TrainEngine
from areal_sc.errors import StaleCall
from areal_sc.run_folder import RunFolder
from areal_sc.transport.interface import host_of
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.base import Method, Worker
from areal_sc.workers.operations import Operation, Operations, digest
from areal_sc.workers.spec import TRAIN_ROLE, WorkerSpec
from areal_sc.workers.weight_publication import WeightPublication

logger = logging.getLogger(__name__)


class TrainWorker(Worker):
    """Serves a `TrainEngine`.

    Calls that change state or write name their operation, which runs once; see `Operations`.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(spec)
        self.engine: TrainEngine = self.handle.build()
        self.operations = Operations(spec.name)
        self._writes: dict[Operation, Future[None]] = {}
        self._place = RankPlace(0, is_head=True)
        self._publication: WeightPublication | None = None
        self._ppo_loss = loss_of(self.handle.config.ppo)
        self._ppo_loss.load()  # a name that is wrong is noticed at the start

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
        await self.operations.close()
        if self._publication:
            self._publication.close()
        await self.compute(self.engine.close)

    async def create_rendezvous(self, args: dict[str, Any]) -> str:
        """Rank 0 hosts the ranks' meeting point on a port of the system's choice."""
        return await self.compute(self.engine.create_rendezvous)

    async def initialize(self, args: dict[str, Any]) -> dict[str, Any]:
        """Joins the other ranks and builds the model; returns this rank's place among them."""
        torch.set_num_threads(self.handle.config.num_threads)
        rank, world_size = int(args["rank"]), int(args["world_size"])
        init_method = str(args["init_method"])
        self.operations.lineage = int(args["lineage"])
        self._place = await self.compute(
            lambda: self.engine.initialize(rank, world_size, init_method)
        )
        self._publication = WeightPublication(
            self.engine,
            self.plane.store,
            self.handle.config.weight_update,
            self.compute,
            rank=rank,
            world_size=world_size,
            host=host_of(self.address),
        )
        return asdict(self._place)

    async def compute_logprobs(self, args: dict[str, Any]) -> dict[str, Any]:
        """Seals `proximal_logprobs` of the batch's rows, on the head of a model group."""
        batch = batch_from_wire(args["batch"])
        rows = await self.plane.puller.pull(batch)

        def compute() -> str:
            logprobs = self.engine.forward(rows, "logprobs")
            if not rows.num_rows or not self._place.is_head:
                return ""
            return self.plane.store.put({"proximal_logprobs": logprobs}, rows.lengths)

        return self._shard_reply(await self.compute(compute))

    async def ppo_update(self, args: dict[str, Any]) -> dict[str, float]:
        """One optimizer update per minibatch."""

        batches = [batch_from_wire(wire) for wire in args["minibatches"]]

        async def pull() -> list[PackedRows]:
            return [await self.plane.puller.pull(batch) for batch in batches]

        async def update(minibatches: list[PackedRows]) -> dict[str, float]:
            return await self.compute(
                lambda: self.engine.update(
                    minibatches,
                    self._ppo_loss,
                    step=self.operations.version,
                    min_token_version=batches[0].min_token_version,
                )
            )

        return dict(await self.operations.join(_operation(args), pull, update))

    async def sft_update(self, args: dict[str, Any]) -> dict[str, float]:
        """One optimizer update on rows of a dataset; makes the next policy version."""
        operation = _operation(args)

        async def read() -> PackedRows:
            dataset = self.sources.prompts(int(args["dataset"]))
            items = [dataset[int(index)] for index in args["indices"]]
            return PackedRows(
                {
                    "input_ids": _packed([item["input_ids"] for item in items], torch.int32),
                    "loss_mask": _packed([item["loss_mask"] for item in items], torch.bool),
                },
                tuple(len(item["input_ids"]) for item in items),
            )

        async def update(rows: PackedRows) -> dict[str, float]:
            step = operation.version
            return await self.compute(lambda: self.engine.update([rows], CROSS_ENTROPY, step=step))

        next_version = operation.version + 1
        return dict(await self.operations.join(operation, read, update, next_version=next_version))

    async def seal_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        """Seals this rank's share of the parameters; the policy version becomes `version`."""

        async def seal() -> dict[str, Any]:
            return self._shard_reply(await self.publication.seal())

        version = int(args["version"])
        return dict(await self.operations.join(_operation(args), seal, next_version=version))

    async def save_weights(self, args: dict[str, Any]) -> dict[str, Any]:
        """Writes the weights to `weight_update.folder`; the policy version becomes `version`.

        Returns: the `folder`, and the `sequence` number of the newest shard in the store.
        """
        version, oldest = int(args["version"]), int(args["oldest"])

        async def save() -> dict[str, Any]:
            folder = await self.publication.save(version, oldest)
            return {"folder": folder, "sequence": self.plane.store.last_sequence}

        return dict(await self.operations.join(_operation(args), save, next_version=version))

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
        operation = _operation(args)
        name = digest([operation.lineage, operation.version, operation.name])
        folder = RunFolder(self.spec.run_dir).exports / self.spec.role / name
        await self._begin_write(operation, lambda: self.engine.begin_save_hf(folder))
        return str(folder)

    async def begin_snapshot(self, args: dict[str, Any]) -> None:
        """Takes this rank's part of a snapshot that the controller completes."""
        operation = _operation(args)
        folder = partial_of(self._snapshot_path(operation)) / self._snapshot_name
        await self._begin_write(operation, lambda: self.engine.begin_snapshot(folder))

    async def finish_write(self, args: dict[str, Any]) -> None:
        """Replies when what the operation took is on the disk. The engine trains meanwhile.

        Raises: CheckpointError: it could not be written. StaleCall: nothing such was begun.
        """
        operation = _operation(args)
        write = self._writes.get(operation)
        if write is None:
            raise StaleCall(f"{operation}: {self.spec.name} writes nothing such")
        # A call that is given up must not cancel the write, which other ranks take part in.
        await asyncio.shield(asyncio.wrap_future(write))

    async def load_snapshot(self, args: dict[str, Any]) -> None:
        """Goes back to the snapshot of the operation's version, in the operation's lineage."""
        operation = _operation(args)
        folder = self._snapshot_path(operation) / self._snapshot_name

        async def load() -> None:
            await self.compute(lambda: self.engine.load_snapshot(folder))

        await self.operations.join(
            operation, load, next_version=operation.version, begins_lineage=True
        )

    async def _begin_write(self, operation: Operation, begin: Callable[[], Future[None]]) -> None:
        """Joins a write of the same name that goes on; what is written already is written again."""
        earlier = self._writes.get(operation)
        if earlier is not None and earlier.done():
            self.operations.forget(operation)

        async def take() -> None:
            write = await self.compute(begin)
            newest = operation.version - 1
            self._writes = {
                other: going_on
                for other, going_on in self._writes.items()
                if other.version >= newest or not going_on.done()
            }
            self._writes[operation] = write

        await self.operations.join(operation, take)

    @property
    def _snapshot_name(self) -> str:
        """Within the folder of a step, which holds the models of all roles."""
        return "engine" if self.spec.role == TRAIN_ROLE else f"engine-{self.spec.role}"

    def _snapshot_path(self, operation: Operation) -> Path:
        return RunFolder(self.spec.run_dir).snapshot_path(operation.version)

    def _shard_reply(self, shard_id: str) -> dict[str, Any]:
        return {
            "node_id": self.spec.name,
            "node_addr": self.address,
            "shard_id": shard_id,
            "sequence": self.plane.store.last_sequence,
        }


def _operation(args: dict[str, Any]) -> Operation:
    return Operation.from_wire(args["operation"])


def _packed(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
    return torch.cat(
        [torch.as_tensor(row, dtype=dtype) for row in values] or [torch.empty(0, dtype=dtype)]
    )
