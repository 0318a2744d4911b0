"""Two ranks that train a model which reads pictures, with its tower: forks of this program.

Run as `python picture_ranks_program.py FOLDER`: `FOLDER/model`, `FOLDER/rows-RANK.pt`. Rank 0
leaves the model in `FOLDER/saved`; each leaves what its updates say in `FOLDER/stats-RANK.json`.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import torch

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, Device, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.entry import prepare_model_loading

NUM_STEPS = 3


def actor_config(model: Path, num_ranks: int) -> ActorConfig:
    return ActorConfig(
        path=str(model),
        device=Device.cpu,
        train_vision_tower=True,
        max_tokens_per_micro_batch=64,
        parallel=ParallelConfig(data=num_ranks),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.0, total_steps=10),
    )


def run_rank(folder: Path, rank: int, addresses: Any) -> None:
    torch.set_num_threads(1)
    rows: PackedRows = torch.load(folder / f"rows-{rank}.pt", weights_only=False)
    engine = FSDPEngine(actor_config(folder / "model", 2))
    if rank == 0:
        addresses.put(engine.create_rendezvous())
    address = addresses.get()
    addresses.put(address)
    engine.initialize(rank, 2, address)
    stats = [engine.update([rows], CROSS_ENTROPY, step=step) for step in range(NUM_STEPS)]
    engine.begin_save_hf(folder / "saved").result()
    engine.close()
    (folder / f"stats-{rank}.json").write_text(json.dumps([dict(it) for it in stats]))


def main(folder: Path) -> None:
    importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")
    prepare_model_loading()
    context = multiprocessing.get_context("fork")
    addresses = context.Queue()
    ranks = [context.Process(target=run_rank, args=(folder, it, addresses)) for it in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(max(abs(rank.exitcode or 0) for rank in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
