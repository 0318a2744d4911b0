"""Publication of weights from an FSDP rank to a LocalEngine, by pull and by disk.

    python benchmarks/publication.py [--quick] [--json FILE] [--device cuda]

Real controllers and workers on one device, nothing generated meanwhile; 10 million parameters on a
CPU, half a billion on a GPU, in bfloat16. `held` is how long training waits (sealed or written),
`total` until the engine has the weights. Device memory is that of the GPU, all processes together,
at most above what was in use before.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import qwen2_models
import report
import torch
from cuda_device import device_memory

from areal_sc import (
    FSDPPPOActor,
    GRPOConfig,
    LocalGenerator,
    RolloutController,
    TrainController,
    load_config,
    make_scheduler,
    start,
)

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "jsonl_math.yaml"


def publish(device: str, method: str, folder: Path, rounds: int) -> dict[str, tuple[float, str]]:
    """Medians of the rounds, after one to warm up."""
    config = load_config(
        [
            *("--config", str(CONFIG)),
            f"run_dir={folder / method}",
            f"actor.path={folder / 'model'}",
            f"actor.device={device}",
            f"rollout.device={device}",
            "actor.dtype=bfloat16",
            f"weight_update.method={method}",
        ],
        GRPOConfig,
    )
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    held_s, total_s = [], []
    try:
        with start(actor, rollout), device_memory(device) as used_bytes:
            for _ in range(rounds + 1):
                began = time.perf_counter()
                actor.publish_weights(rollout)
                held_s.append(time.perf_counter() - began)
                rollout.wait_for_weights()
                total_s.append(time.perf_counter() - began)
            (stats,) = rollout.worker_stats()
    finally:
        scheduler.close()
    return {
        "held_s": (statistics.median(held_s[1:]), "s"),
        "total_s": (statistics.median(total_s[1:]), "s"),
        "first_total_s": (total_s[0], "s"),
        "load_s": (stats["update_load_s"] / len(total_s), "s"),
        "bytes": (stats["update_bytes"] / len(total_s), "B"),
        "added_device_bytes": (max(used_bytes) - used_bytes[0], "B"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    report.add_device(parser)
    arguments = parser.parse_args()
    rounds = 1 if arguments.quick else 7
    size = "0.5b" if arguments.device == "cuda" else "10m"
    metrics: dict[str, tuple[float, str]] = {}
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder = Path(name)
        qwen2_models.write_folder(folder / "model", qwen2_models.SHAPES[size], torch.bfloat16)
        for method in ("pull", "disk"):
            for key, entry in publish(arguments.device, method, folder, rounds).items():
                metrics[f"{method}_{key}"] = entry
    report.print_metrics(
        "Publication of weights to a LocalEngine",
        {"model": size, "dtype": "bfloat16", "device": arguments.device, "rounds": rounds},
        metrics,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
