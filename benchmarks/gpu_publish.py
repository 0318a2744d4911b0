"""Publication of weights from an FSDP rank to a LocalEngine, by pull and by disk.

Real controllers and workers on one device, nothing generated meanwhile. `held` is how long training
waits (sealed or written), `total` until the engine has the weights. Memory is that of the device,
all processes together, above what was in use before.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import report
import torch
from generate_throughput import build_tokenizer
from gpu_common import ROOT, Setting, sizes_for, watched_memory

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

METHODS = ("pull", "disk")


def measure(setting: Setting) -> report.Metrics:
    sizes = sizes_for(setting)
    metrics: dict[str, tuple[float, str]] = {}
    rows = []
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder = Path(name)
        sizes.build(torch.bfloat16, "cpu").save_pretrained(folder / "model")
        build_tokenizer().save_pretrained(folder / "model")
        for method in METHODS:
            measured = _publish(setting, method, folder)
            for key, (value, unit) in measured.items():
                metrics[f"publish_{method}_{key}"] = (value, unit)
            rows.append(
                (
                    method,
                    measured["held_s"][0],
                    measured["total_s"][0],
                    measured["load_s"][0],
                    measured["bytes"][0] / 1e9,
                    measured["added_device_bytes"][0] / (1 << 30),
                )
            )
    report.print_table(
        f"Publication of weights to a LocalEngine, {sizes.name}",
        {"dtype": "bfloat16", "device": setting.device},
        ("method", "held s", "total s", "of it loading", "GB", "device GiB above before"),
        rows,
    )
    return metrics


def _rounds(setting: Setting) -> int:
    if not setting.is_cuda:
        return 1
    return 3 if setting.is_quick else 7


def _publish(setting: Setting, method: str, folder: Path) -> dict[str, tuple[float, str]]:
    config = load_config(
        [
            *("--config", str(ROOT / "configs" / "jsonl_math.yaml")),
            f"run_dir={folder / method}",
            f"actor.path={folder / 'model'}",
            f"actor.device={setting.device}",
            f"rollout.device={setting.device}",
            f"weight_update.method={method}",
        ],
        GRPOConfig,
    )
    scheduler = make_scheduler(config.scheduler)
    actor = TrainController(FSDPPPOActor(config.actor), scheduler)
    rollout = RolloutController(LocalGenerator(config.rollout), scheduler)
    held_s, total_s = [], []
    try:
        with start(actor, rollout), watched_memory(setting.device) as memory:
            for _ in range(_rounds(setting) + 1):
                began = time.perf_counter()
                actor.publish_weights(rollout)
                held_s.append(time.perf_counter() - began)
                rollout.wait_for_weights()
                total_s.append(time.perf_counter() - began)
            (stats,) = rollout.worker_stats()
    finally:
        scheduler.close()
    num_updates = len(total_s)
    return {
        "held_s": (statistics.median(held_s[1:]), "s"),
        "total_s": (statistics.median(total_s[1:]), "s"),
        "first_total_s": (total_s[0], "s"),
        "load_s": (stats["update_load_s"] / num_updates, "s"),
        "bytes": (stats["update_bytes"] / num_updates, "B"),
        "added_device_bytes": (memory.added_bytes, "B"),
        "peak_device_bytes": (memory.peak_bytes, "B"),
    }
