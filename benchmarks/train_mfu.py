"""What share of a GPU's peak a training step reaches, at the shapes of 0.5B and 7B models.

    python benchmarks/train_mfu.py [--quick] [--json FILE] [--device cuda] [--only NAME]

Random weights, one rank without FSDP, bfloat16 over float32 parameters and AdamW state; a step is
an update of two minibatches without the forward before it, as in `train_throughput`. Values are
medians of the rounds. `share_of_peak` is model FLOPs a second over the data sheet's rate.

- 0.5b: Qwen2-0.5B, micro-batches of 8,192 tokens. wide: of 32,768. float16: those, in float16 with
  a scaled loss. compiled: those, with `actor.compile_layers`.
- 7b_layers: eight layers of Qwen2-7B, as many as have room beside their optimizer, and its
  vocabulary; with activation checkpointing. selective: products and attention are kept. offload:
  what is kept is in host memory. compiled: as above.
- 7b_lora: all 28 layers of Qwen2-7B, and an adapter of rank 16.

On a GPU also counted: kernels of one micro-batch, and how often the host waited for the device;
and listed: the kernels that take longest.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import report
import torch
from cuda_device import peak_allocated, peak_bf16_flops
from qwen2_models import SHAPES, Shape, build, build_tokenizer
from torch.profiler import ProfilerActivity, profile
from train_throughput import actor_config
from train_workload import Workload, lognormal_lengths, make_rows, minibatches_of

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import ActivationCheckpointing, ActorConfig, Dtype
from areal_sc.engines.fsdp.engine import FSDPEngine

LAYERS_OF_7B = Shape(3584, 18944, 8, 28, 4, 152064)
UPDATE_SHARE = 3 / 4
"""Of the FLOPs of a step with its forward before, which `Workload.model_flops` counts."""

ADAPTER_SHARE = 1 / 2
"""The same where an adapter is trained: the model's own parameters have no gradients."""


@dataclass(frozen=True)
class Case:
    """One shape, and the settings of the engine that trains it."""

    name: str
    shape: Shape
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.none
    offloads: bool = False
    compiles: bool = False
    max_tokens: int = 8192
    dtype: Dtype = Dtype.bfloat16
    lora_rank: int = 0


WIDE = 32768
WHOLE = ActivationCheckpointing.layers
CASES = [
    Case("0.5b", SHAPES["0.5b"]),
    Case("0.5b_wide", SHAPES["0.5b"], max_tokens=WIDE),
    Case("0.5b_float16", SHAPES["0.5b"], max_tokens=WIDE, dtype=Dtype.float16),
    Case("7b_layers", LAYERS_OF_7B, checkpointing=WHOLE),
    Case("7b_lora", replace(LAYERS_OF_7B, layers=28), checkpointing=WHOLE, lora_rank=16),
    Case("7b_layers_selective", LAYERS_OF_7B, checkpointing=ActivationCheckpointing.selective),
    Case("0.5b_compiled", SHAPES["0.5b"], compiles=True, max_tokens=WIDE),
    Case("7b_layers_offload", LAYERS_OF_7B, checkpointing=WHOLE, offloads=True),
    Case("7b_layers_compiled", LAYERS_OF_7B, checkpointing=WHOLE, compiles=True),
]
"""In the order of what they tell."""


def config_of(case: Case, workload: Workload, folder: Path, device: str) -> ActorConfig:
    build(case.shape, device="meta").config.save_pretrained(folder)
    build_tokenizer(case.shape).save_pretrained(folder)
    return replace(
        actor_config(workload, folder, device),
        dtype=case.dtype,
        random_init=True,
        activation_checkpointing=case.checkpointing,
        activation_offload=case.offloads,
        compile_layers=case.compiles,
        lora=LoraConfig(rank=case.lora_rank),
    )


def measure(case: Case, device: str, *, quick: bool) -> report.Metrics:
    count, rounds = (16, 2) if quick else (64, 5)
    if device == "cpu":  # to see that it works
        count, rounds = 2, 1
    rows_lengths = lognormal_lengths(count, 400.0, 0.6, 16, 2048)
    workload = Workload(case.name, case.shape, case.max_tokens, rows_lengths)
    with tempfile.TemporaryDirectory(prefix="areal-sc-model-") as name:
        engine = FSDPEngine(config_of(case, workload, Path(name), device))
        began = time.perf_counter()
        engine.initialize(0, 1, "")
        started_s = time.perf_counter() - began
        rows = make_rows(workload)
        known = replace(
            rows, fields={**rows.fields, "proximal_logprobs": rows.fields["behavior_logprobs"]}
        )
        minibatches = [known.take(part) for part in minibatches_of(rows)]
        loss = loss_of(engine.config.ppo)

        def step() -> dict[str, float]:
            return engine.update(minibatches, loss, step=0)

        step()  # warms up, and compiles
        seconds = [_timed(step, device) for _ in range(rounds)]
        peak_bytes = peak_allocated(device, step)
        num_micro_batches = step()["num_micro_batches"]
        counts = _counts(step, num_micro_batches) if device == "cuda" else {}
        engine.close()
    step_s = statistics.median(seconds)
    metrics = {
        "step_s": step_s,
        "tokens_per_s": workload.num_tokens / step_s,
        "start_s": started_s,
        "step_peak_bytes": float(peak_bytes),
        **counts,
    }
    if (sheet := peak_bf16_flops(device)) is not None:
        share = ADAPTER_SHARE if case.lora_rank else UPDATE_SHARE
        metrics["share_of_peak"] = share * workload.model_flops() / step_s / sheet
    return metrics


def _timed(step: Callable[[], object], device: str) -> float:
    before = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - before


def _counts(step: Callable[[], object], num_micro_batches: float) -> report.Metrics:
    """Kernels of a micro-batch, and the host's waits in a whole step."""
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    num_waits = sum("synchronizing CUDA operation" in str(it.message) for it in told)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    longest = profiled.key_averages().table("self_cuda_time_total", 30, max_name_column_width=90)
    print(longest)
    on_device = [it for it in profiled.events() if it.device_type == torch.autograd.DeviceType.CUDA]
    return {
        "kernels_a_micro_batch": len(on_device) / num_micro_batches,
        "waits_a_step": float(num_waits),
    }


def main() -> None:
    parser = report.make_parser(__doc__, device=True)
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, help="one case (default: all)")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        torch.set_num_threads(1)
    cases = [case for case in CASES if arguments.only in (None, case.name)]
    if arguments.device == "cpu":  # where compiling layers takes minutes
        is_asked = arguments.only is not None
        cases = [replace(it, shape=SHAPES["1m"]) for it in cases if is_asked or not it.compiles]
    metrics: report.Metrics = {}
    for case in cases:
        found = measure(case, arguments.device, quick=arguments.quick)
        settings = {"device": arguments.device}
        report.print_metrics(f"Training step, {case.name}", settings, found)
        metrics |= {f"{case.name}_{name}": value for name, value in found.items()}
        report.write(metrics, arguments.json)  # after each: a call may end before the last
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
