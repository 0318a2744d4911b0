"""A trainer of one rank that publishes its weights: a role of planes_role.py.

Run as `python weight_trainer.py RUN_FOLDER NAME SETTINGS`, SETTINGS as JSON: `path`, `dtype`,
`device`, `method`, `folder`, `bucket_bytes`. It is a train worker without the training: FSDPEngine,
tensor store in shared memory, WeightPublication, and one thread for the engine.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins
from planes_ours import Worker, worker
from planes_role import Handlers, serve_async

from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    OptimizerConfig,
    PPOConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.weight_group import unfilled
from areal_sc.workers.calls import OpenWeightGroup
from areal_sc.workers.weight_publication import WeightPublication

HOST = "127.0.0.1"


def make_config(settings: dict[str, Any]) -> ActorConfig:
    return ActorConfig(
        path=settings["path"],
        dtype=Dtype(settings["dtype"]),
        device=Device(settings["device"]),
        seed=0,
        optimizer=OptimizerConfig(total_steps=1),
        ppo=PPOConfig(),
        weight_update=WeightUpdateConfig(
            method=WeightUpdateMethod(settings["method"]),
            folder=settings["folder"],
            bucket_bytes=settings["bucket_bytes"],
        ),
    )


def trainer_handlers(node: Worker, config: ActorConfig) -> Handlers:
    engine = FSDPEngine(config)
    thread = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def compute(function: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(thread, function)

    publication = WeightPublication(
        engine,
        node.plane.store,
        config.weight_update,
        compute,
        rank=0,
        world_size=1,
        host=HOST,
        node="",
    )

    async def initialize() -> int:
        """Bytes of a publication."""
        torch.set_num_threads(config.num_threads)
        await compute(lambda: engine.initialize(0, 1, ""))
        layouts = engine.weight_layouts(config.weight_update.bucket_bytes)
        return sum(tensor.nbytes for layout in layouts for _, tensor in unfilled(layout))

    async def change() -> None:
        """Other weights than before, of the same scale."""

        def turn() -> None:
            with torch.no_grad():
                for parameter in engine._model.parameters():
                    parameter.neg_()

        await compute(turn)

    async def seal() -> dict[str, Any]:
        """What the puller needs, and the seconds; older versions are forgotten."""
        start = time.perf_counter()
        shard_id = await publication.seal()
        sequence = node.plane.store.last_sequence
        node.plane.store.sweep([sequence], sequence)
        elapsed = time.perf_counter() - start
        return {"shard": [node.node_id, node.address, shard_id], "seconds": elapsed}

    async def save(version: int) -> dict[str, Any]:
        start = time.perf_counter()
        folder = await publication.save(version, version - 1)
        return {"folder": folder, "seconds": time.perf_counter() - start}

    async def broadcast() -> dict[str, Any]:
        start = time.perf_counter()
        sent = await publication.broadcast()
        seconds = time.perf_counter() - start
        return {"bytes": sent.num_bytes, "failure": sent.failure, "seconds": seconds}

    async def open_group(name: str, world_size: int) -> Any:
        # the trainer has the first GPU and a server may have another one: no device is in both
        has_gpus = engine.is_cuda and torch.cuda.device_count() > 1
        wanted = OpenWeightGroup(name, world_size, is_cuda=has_gpus, devices=())
        return to_builtins(await publication.open_group(wanted))

    async def layouts() -> Any:
        return to_builtins(await publication.layouts())

    return {
        "pid": os.getpid,
        "initialize": initialize,
        "change": change,
        "seal": seal,
        "save": save,
        "open_group": open_group,
        "meet_group": publication.meet_group,
        "layouts": layouts,
        "broadcast": broadcast,
    }


async def main() -> None:
    run_folder, name, settings = sys.argv[1:]
    async with worker(name, Path(run_folder), encrypt=False, shares_memory=True) as node:
        await serve_async(trainer_handlers(node, make_config(json.loads(settings))))


if __name__ == "__main__":
    asyncio.run(main())
