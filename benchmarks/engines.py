"""LocalEngine against a real SGLang server: the same model, the same requests, tokens a second.

    python benchmarks/engines.py [--quick] [--json FILE] [--size 1m]
    python benchmarks/engines.py --device cuda --size 0.5b

Both engines are in one run, with one compute thread each on a CPU (`rollout.num_threads`,
OMP_NUM_THREADS), or both on one GPU in bfloat16. They take turns; whoever is not measured is idle.
Requests come at once and complete by length; both engines give log-probabilities of every token.

- full batch: as many equal prompts as slots, completions of one length.
- mixed: four times as many requests as slots, prompts and completions of different lengths.
- groups: eight completions a prompt that share its prefill, short ones.

`local_over_sglang` is the ratio of tokens a second: the median over the rounds, of the workload
where it is lowest; with several sizes, of the last. LocalEngine computes in the benchmark's own
process; SGLang has processes of its own (HTTP, scheduler, detokenizer) that may use another core,
and its requests cross HTTP: `CPU ms/1000 tokens` counts all processes of a side, this one too.

On a CPU SGLang runs with torch's attention (`attention_backend: torch_native`), which is what it
has without Intel AMX: the ratio there says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import qwen2_models
import report
import sglang_side
import torch
from generate_throughput import Job, full_batch, letter_sort, mixed, with_engine
from process_cpu import cpu_seconds

from areal_sc.config.schema import (
    Device,
    Dtype,
    RolloutConfig,
    SGLangConfig,
    WeightUpdateConfig,
)
from areal_sc.engines.base import GenerationEngine
from areal_sc.engines.local.engine import LocalEngine

SIDES = ("LocalEngine", "SGLang")
MAX_CONTEXT_TOKENS = 512
GROUP_SIZE = 8
WORKLOADS: dict[str, Callable[[int], Callable[[int], list[Job]]]] = {
    "full batch": full_batch,
    "mixed": mixed,
    "groups": lambda slots: letter_sort(slots // 2),
}
GPU_MEMORY_SHARE = 0.4
"""SGLang's part of the GPU, so that LocalEngine has room beside it."""


@dataclass
class Rates:
    """Of one workload, by side; one entry a round."""

    tokens_per_s: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SIDES})
    cpu_per_token: dict[str, list[float]] = field(default_factory=lambda: {s: [] for s in SIDES})

    def median(self, side: str) -> float:
        return statistics.median(self.tokens_per_s[side])

    @property
    def ratios(self) -> list[float]:
        pairs = zip(*(self.tokens_per_s[side] for side in SIDES), strict=True)
        return [local / sglang for local, sglang in pairs]


async def measure(
    size: str,
    workloads: Sequence[str],
    slots: int,
    device: Device,
    rounds: int,
    sglang_python: Path,
) -> dict[str, Rates]:
    """By workload; one server, and one LocalEngine, for all of them."""
    dtype = Dtype.float32 if device == Device.cpu else Dtype.bfloat16
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-sc-model-")))
        torch_dtype = getattr(torch, dtype)
        qwen2_models.write_folder(folder / "model", qwen2_models.SHAPES[size], torch_dtype)
        config = RolloutConfig(
            path=str(folder / "model"),
            dtype=dtype,
            device=device,
            max_running_sequences=slots,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            num_threads=1,
            seed=0,
            weight_update=WeightUpdateConfig(),
        )
        arguments = {} if device == Device.cpu else {"mem_fraction_static": GPU_MEMORY_SHARE}
        sglang = SGLangConfig(python=str(sglang_python), args=arguments)
        local = LocalEngine(config)
        await local.start()
        stack.push_async_callback(local.close)
        server = await stack.enter_async_context(
            sglang_side.serving(replace(config, sglang=sglang))
        )
        pids = {"server": server.replicas[0].server.pid}
        engines: dict[str, GenerationEngine] = {"LocalEngine": local, "SGLang": server}
        return {
            workload: await compare(engines, pids, WORKLOADS[workload](slots), rounds)
            for workload in workloads
        }


async def compare(
    engines: dict[str, GenerationEngine],
    pids: dict[str, int],
    make_jobs: Callable[[int], list[Job]],
    rounds: int,
) -> Rates:
    rates = Rates()
    for number in range(rounds + 1):
        jobs = make_jobs(number)
        num_tokens = sum(job.num_new_tokens for job in jobs)
        for side in SIDES if number % 2 == 0 else SIDES[::-1]:
            before = sum(cpu_seconds(pids).values())
            elapsed_s = await with_engine(engines[side], jobs)
            cpu_s = sum(cpu_seconds(pids).values()) - before
            if number > 0:  # the first round warms up
                rates.tokens_per_s[side].append(num_tokens / elapsed_s)
                rates.cpu_per_token[side].append(cpu_s / num_tokens)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    sglang_side.add_arguments(parser)
    parser.add_argument("--size", nargs="+", choices=tuple(qwen2_models.SHAPES))
    report.add_device(parser)
    parser.add_argument("--slots", type=int, help="default 32, quick 8")
    parser.add_argument("--rounds", type=int, help="timed rounds a row (default 5, quick 1)")
    arguments = parser.parse_args()
    sglang_side.check_python(parser, arguments.sglang_python)
    torch.set_num_threads(1)
    load = os.getloadavg()[0]
    quick = arguments.quick
    device = Device(arguments.device)
    default_sizes = ["0.5b"] if device == Device.cuda else ["1m"]
    sizes = arguments.size or default_sizes
    slots = arguments.slots or (8 if quick else 32)
    rounds = arguments.rounds or (1 if quick else 5)
    metrics = {}
    for size in sizes:
        results = asyncio.run(
            measure(size, tuple(WORKLOADS), slots, device, rounds, arguments.sglang_python)
        )
        rows = []
        for workload, rates in results.items():
            ratios = rates.ratios
            ratio = statistics.median(ratios)
            cpu = (statistics.median(rates.cpu_per_token[side]) * 1e6 for side in SIDES)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            rows.append((size, workload, *map(rates.median, SIDES), ratio, spread, *cpu))
            key = f"{size}_{workload.replace(' ', '_')}"
            for side in SIDES:
                metrics[f"{key}_{side.lower()}_tokens_per_s"] = (rates.median(side), "tokens/s")
            metrics[f"{key}_local_over_sglang"] = (ratio, "ratio")
        report.print_table(
            "Generation: LocalEngine against an SGLang server",
            {
                "rounds": rounds,
                "slots": slots,
                "device": str(device),
                "dtype": "float32, one thread each" if device == Device.cpu else "bfloat16",
                "load of the machine beforehand": f"{load:.1f}",
            },
            (
                *(
                    "model",
                    "workload",
                    *(f"{side} tok/s" for side in SIDES),
                    "ratio",
                    "of the rounds",
                ),
                *(f"{side} CPU ms/1000 tokens" for side in SIDES),
            ),
            rows,
        )
        lowest = min(row[4] for row in rows)
    metrics["local_over_sglang"] = (lowest, "ratio")
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
