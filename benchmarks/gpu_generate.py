"""Generation of a model of half a billion parameters: LocalEngine against a static batch loop.

As many equal prompts as slots, completions of one length: see generate_throughput.py, whose jobs
and loops these are. With `--sglang-python`, one SGLang server gets the same jobs, and weights by
its own way of loading a folder.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import report
import torch
from generate_throughput import build_tokenizer, full_batch, static_batches, with_engine
from gpu_common import Setting, peak_allocated, sizes_for, synchronize
from transformers import PreTrainedModel

from areal_sc.config.schema import (
    Device,
    Dtype,
    RolloutConfig,
    SGLangConfig,
    WeightUpdateConfig,
    WeightUpdateMethod,
)
from areal_sc.engines.handles import SGLangEngine
from areal_sc.engines.local.engine import LocalEngine

MAX_CONTEXT_TOKENS = 1024


def measure(setting: Setting) -> report.Metrics:
    sizes = sizes_for(setting)
    model = sizes.build(torch.bfloat16, setting.device)
    metrics: dict[str, tuple[float, str]] = {}
    rows = []
    for num_slots in _batches(setting):
        rates: dict[str, list[float]] = {}

        def job(num_slots: int = num_slots, rates: Any = rates) -> None:
            rates.update(asyncio.run(_compare(model, num_slots, setting)))

        peak = peak_allocated(setting.device, job)
        ours, static = (statistics.median(rates[side]) for side in ("engine", "static"))
        rows.append((num_slots, ours, static, ours / static, peak / (1 << 30)))
        metrics[f"generate_batch{num_slots}_tokens_per_s"] = (ours, "tokens/s")
        metrics[f"generate_batch{num_slots}_over_static"] = (ours / static, "x")
        metrics[f"generate_batch{num_slots}_peak_bytes"] = (peak, "B")
    report.print_table(
        f"Generation in bfloat16, {sizes.name}",
        {"prompt tokens": 32, "new tokens": 128},
        ("slots", "LocalEngine tok/s", "static tok/s", "ratio", "peak GiB of both"),
        rows,
    )
    return metrics


def measure_sglang(setting: Setting) -> report.Metrics:
    """The same jobs through one SGLang server."""
    sizes = sizes_for(setting)
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
        folder = Path(name) / "model"
        sizes.build(torch.bfloat16, "cpu").save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        logs = Path(name) / "logs"
        logs.mkdir()
        try:
            metrics = asyncio.run(_serve(setting, folder, logs))
        except BaseException:
            for log in sorted(logs.iterdir()):
                print(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}")
            raise
    report.print_table(
        f"SGLang server in bfloat16, {sizes.name}",
        {"prompt tokens": 32, "new tokens": 128},
        ("number", "value", "unit"),
        [(key, value, unit) for key, (value, unit) in metrics.items()],
    )
    return metrics


def _batches(setting: Setting) -> tuple[int, ...]:
    return (64, 256) if setting.is_cuda else (4, 8)


def _rounds(setting: Setting) -> int:
    if not setting.is_cuda:
        return 1
    return 2 if setting.is_quick else 5


async def _compare(
    model: PreTrainedModel, num_slots: int, setting: Setting
) -> dict[str, list[float]]:
    """Tokens/s of each side in every round, timed alternately after one round to warm up."""
    config = RolloutConfig(
        path="",
        dtype=Dtype.bfloat16,
        max_running_sequences=num_slots,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        seed=0,
    )
    engine = LocalEngine.from_model(model, build_tokenizer(), config)
    await engine.start()
    rates: dict[str, list[float]] = {"engine": [], "static": []}
    for number in range(_rounds(setting) + 1):
        jobs = full_batch(num_slots)(number)
        num_tokens = sum(job.num_new_tokens for job in jobs)
        engine_s = await with_engine(engine, jobs)
        synchronize(setting.device)
        with torch.device(setting.device):  # the loop makes its tensors where the model is
            static_s = static_batches(model, jobs, num_slots)
        if number:
            rates["engine"].append(num_tokens / engine_s)
            rates["static"].append(num_tokens / static_s)
    await engine.close()
    return rates


async def _serve(setting: Setting, folder: Path, logs: Path) -> dict[str, tuple[float, str]]:
    batches = _batches(setting)
    config = RolloutConfig(
        path=str(folder),
        device=Device(setting.device),
        dtype=Dtype.bfloat16,
        max_running_sequences=max(batches),
        max_context_tokens=MAX_CONTEXT_TOKENS,
        seed=0,
        sglang=SGLangConfig(python=setting.sglang_python, start_timeout_s=setting.limit_s),
        weight_update=WeightUpdateConfig(method=WeightUpdateMethod.disk, folder=str(folder)),
    )
    engine = SGLangEngine(config).build(log_folder=logs, name="rollout")
    metrics: dict[str, tuple[float, str]] = {}
    try:
        started = time.perf_counter()
        await engine.start()
        metrics["sglang_start_s"] = (time.perf_counter() - started, "s")
        served: Any = engine  # it has the same `generate`
        for num_slots in batches:
            rates = []
            for number in range(_rounds(setting) + 1):
                jobs = full_batch(num_slots)(number)
                num_tokens = sum(job.num_new_tokens for job in jobs)
                rates.append(num_tokens / await with_engine(served, jobs))
            metrics[f"sglang_batch{num_slots}_tokens_per_s"] = (
                statistics.median(rates[1:]),
                "tokens/s",
            )
        started = time.perf_counter()
        await engine.update_weights_from_disk(1, folder)
        metrics["sglang_update_from_disk_s"] = (time.perf_counter() - started, "s")
    finally:
        await engine.close()
    return metrics
