"""One of two ranks that train a model which reads pictures, with its tower.

Run as `python picture_rank.py FOLDER RANK`: `FOLDER/model`, `FOLDER/rows-RANK.pt`. Rank 0 leaves
the model in `FOLDER/saved`; each leaves what its updates say in `FOLDER/stats-RANK.json`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from areal_sc.algorithms.named_loss import CROSS_ENTROPY
from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

NUM_STEPS = 3


def actor_config(model: Path, num_ranks: int, dtype: Dtype = Dtype.float32) -> ActorConfig:
    return ActorConfig(
        path=str(model),
        device=Device.cpu,
        dtype=dtype,
        train_vision_tower=True,
        max_tokens_per_micro_batch=64,
        parallel=ParallelConfig(data=num_ranks),
        optimizer=OptimizerConfig(lr=1e-3, eps=1e-4, max_grad_norm=0.0, total_steps=10),
    )


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    rows: PackedRows = torch.load(folder / f"rows-{rank}.pt", weights_only=False)
    engine = FSDPEngine(actor_config(folder / "model", 2))
    address = folder / "address"
    if rank == 0:
        address.with_suffix(".part").write_text(engine.create_rendezvous())
        address.with_suffix(".part").rename(address)
    while not address.exists():
        time.sleep(0.05)
    engine.initialize(rank, 2, address.read_text())
    stats = [engine.update([rows], CROSS_ENTROPY, step=step) for step in range(NUM_STEPS)]
    engine.begin_save_hf(folder / "saved").result()
    engine.close()
    (folder / f"stats-{rank}.json").write_text(json.dumps([dict(it) for it in stats]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
