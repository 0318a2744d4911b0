"""LocalEngine against plain static-batch loops, or against a real SGLang server.

    python benchmarks/generate_throughput.py [--quick] [--json FILE] [--device cuda]
        [--against static|sglang]

The same model with random weights, the same requests; the sides take turns, values are medians.
Requests come at once and complete by length; both sides give log-probabilities of every token. On a
CPU there are small models, and one compute thread a side; on a GPU a model of half a billion
parameters in bfloat16.

- full batch: as many equal prompts as slots, completions of one length. The static loop pays for
  no padding, no joining, no bookkeeping: it is what batched decoding costs at least.
- mixed: four times as many requests as slots, prompts and completions of different lengths. The
  static loop takes batches in order of arrival, left-padded, and waits for the longest completion;
  tokens after a completion's end do not count.
- letter-sort, groups: short prompts in groups of 8 that share their prefill, and short completions,
  so that requests join and leave at nearly every step.

SGLang has processes of its own (HTTP, scheduler, detokenizer) that may use another core: `cpu per
1000 tokens` counts all processes of a side. On a CPU SGLang runs with torch's attention, which is
what it has without Intel AMX: the ratio there says nothing about GPUs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import qwen2_models
import report
import sglang_side
import torch
from processes import cpu_seconds
from qwen2_models import NUM_WORDS, SHAPES, Shape
from random_model_run import model_folder
from transformers import DynamicCache, PreTrainedModel

from areal_sc.config.schema import Device, Dtype, GenerationConfig, RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.base import GenerationEngine, RequestOptions
from areal_sc.engines.local.engine import LocalEngine

GPU_MEMORY_SHARE = 0.4
"""SGLang's part of the GPU, so that LocalEngine has room beside it."""


@dataclass(frozen=True)
class Job:
    """One completion of exactly `num_new_tokens` tokens."""

    prompt: list[int]
    num_new_tokens: int
    group: str | None = None


@torch.inference_mode()
def static_batch(model: PreTrainedModel, jobs: Sequence[Job]) -> None:
    """Samples all jobs side by side at temperature 1, with log-probabilities."""
    width = max(len(job.prompt) for job in jobs)
    padding = [width - len(job.prompt) for job in jobs]
    inputs = torch.tensor([[0] * pad + job.prompt for pad, job in zip(padding, jobs, strict=True)])
    num_steps = max(job.num_new_tokens for job in jobs)
    mask = torch.arange(width + num_steps) >= torch.tensor(padding)[:, None]
    is_padded = any(padding)
    positions = (torch.arange(width) - torch.tensor(padding)[:, None]).clamp_(min=0)
    cache = DynamicCache(config=model.config)
    sampled, logprobs = [], []
    for step in range(num_steps):
        output = model(
            inputs,
            attention_mask=mask[:, : width + step] if is_padded else None,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        distribution = torch.log_softmax(output.logits[:, -1].float(), dim=-1)
        inputs = torch.multinomial(distribution.exp(), 1)
        sampled.append(inputs)
        logprobs.append(distribution.gather(1, inputs))
        positions = positions[:, -1:] + 1
    # what a caller needs: tokens and log-probabilities on the host
    torch.cat(sampled, dim=1).tolist()
    torch.cat(logprobs, dim=1).tolist()


async def static_batches(model: PreTrainedModel, num_slots: int, jobs: Sequence[Job]) -> None:
    """All jobs in batches of `num_slots`, in order of arrival."""
    with torch.device(model.device):
        for first in range(0, len(jobs), num_slots):
            static_batch(model, jobs[first : first + num_slots])


async def with_engine(engine: GenerationEngine, jobs: Sequence[Job]) -> None:
    """All jobs, given to the engine at once."""
    completions = await asyncio.gather(
        *(
            engine.generate(
                job.prompt,
                GenerationConfig(max_new_tokens=job.num_new_tokens),
                RequestOptions(prefix_group=job.group),
            )
            for job in jobs
        )
    )
    for job, completion in zip(jobs, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == job.num_new_tokens


@dataclass(frozen=True)
class Case:
    """A row of the table: requests of one kind to a model."""

    workload: str
    model: str
    shape: Shape
    num_slots: int
    make_jobs: Callable[[int, int], list[Job]]


class Sides:
    """LocalEngine and what it is compared with, both ready to generate with the same model."""

    def __init__(self, local: LocalEngine) -> None:
        self._runs: dict[str, Callable[[Sequence[Job]], Awaitable[None]]] = {}
        self._pids: dict[str, int] = {}
        self.add("local", partial(with_engine, local))

    def add(self, name: str, run: Callable[[Sequence[Job]], Awaitable[None]], **pids: int) -> None:
        """A side that answers all jobs by `run`, in this process and those of `pids`."""
        self._runs[name] = run
        self._pids |= pids

    async def compare(self, case: Case, rounds: int) -> report.Metrics:
        """Medians of the rounds; sides take turns, and the first round warms up."""
        names = list(self._runs)
        rates: dict[str, list[float]] = {name: [] for name in names}
        cpu_ms: dict[str, list[float]] = {name: [] for name in names}
        for number in range(rounds + 1):
            jobs = case.make_jobs(case.num_slots, number)
            num_tokens = sum(job.num_new_tokens for job in jobs)
            for name in names if number % 2 == 0 else names[::-1]:
                cpu_before, start = self._cpu_s(), time.perf_counter()
                await self._runs[name](jobs)
                rates[name].append(num_tokens / (time.perf_counter() - start))
                cpu_ms[name].append(1e6 * (self._cpu_s() - cpu_before) / num_tokens)
        local, other = names
        ratios = [a / b for a, b in zip(rates[local][1:], rates[other][1:], strict=True)]
        measured = {f"{n}_tokens_per_s": statistics.median(rates[n][1:]) for n in names}
        measured |= {f"{n}_cpu_per_1000_tokens_ms": statistics.median(cpu_ms[n][1:]) for n in names}
        measured[f"local_over_{other}"] = statistics.median(ratios)
        measured["least"], measured["most"] = min(ratios), max(ratios)
        return measured

    def _cpu_s(self) -> float:
        return sum(cpu_seconds(self._pids).values())


@asynccontextmanager
async def started(case: Case, against: str, device: Device, sglang: Path) -> AsyncIterator[Sides]:
    """Both sides, for all cases with this model and so many slots."""
    dtype = Dtype.float32 if device == Device.cpu else Dtype.bfloat16
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(model_folder(case.shape, dtype))
        config = RolloutConfig(
            path=str(folder),
            dtype=dtype,
            device=device,
            max_running_sequences=case.num_slots,
            max_context_tokens=1024,
            num_threads=1,
            seed=0,
            sglang=SGLangConfig(
                python=str(sglang),
                args={} if device == Device.cpu else {"mem_fraction_static": GPU_MEMORY_SHARE},
            ),
        )
        local = LocalEngine(config)
        await local.start()
        stack.push_async_callback(local.close)
        sides = Sides(local)
        if against == "sglang":
            server = await stack.enter_async_context(sglang_side.serving(config))
            assert server.server.process
            pid = server.server.process.pid
            sides.add("sglang", partial(with_engine, server), server=pid)
        else:
            model = qwen2_models.build(case.shape, getattr(torch, dtype), device)
            sides.add("static", partial(static_batches, model, case.num_slots))
        yield sides


def full_batch(num_slots: int, seed: int) -> list[Job]:
    rng = random.Random(seed)
    return [Job(rng.choices(range(NUM_WORDS), k=32), 128) for _ in range(num_slots)]


def mixed(num_slots: int, seed: int) -> list[Job]:
    """Lognormal completion lengths: median 48, sigma 0.8, at most 384."""
    rng = random.Random(seed)
    return [
        Job(
            rng.choices(range(NUM_WORDS), k=rng.randrange(4, 64)),
            max(1, min(384, round(48 * rng.lognormvariate(0, 0.8)))),
        )
        for _ in range(4 * num_slots)
    ]


def letter_sort(num_groups: int, seed: int) -> list[Job]:
    """n letters and `=`, answered by n letters and `$`; n lognormal, median 7, 2..26."""
    rng = random.Random(seed)
    jobs = []
    for group in range(num_groups):
        n = max(2, min(26, round(7 * rng.lognormvariate(0, 0.6))))
        jobs += [Job(rng.choices(range(30), k=n + 1), n + 1, f"{seed}/{group}")] * 8
    return jobs


def static_cases(device: str, *, quick: bool) -> list[Case]:
    def small(hidden: int, layers: int = 2, vocabulary: int = NUM_WORDS) -> Shape:
        return Shape(hidden, 256 if hidden == 96 else 4 * hidden, layers, 4, 2, vocabulary)

    if device == "cuda":
        return [
            Case("full_batch", "0.5b", SHAPES["0.5b"], slots, full_batch) for slots in (64, 256)
        ]
    full = [
        Case("full_batch", f"hidden{hidden}", small(hidden), 32, full_batch)
        for hidden in (64, 128, 256)
    ]
    letters = [
        Case("letter_sort", "hidden96", small(96, 3, 30), slots, letter_sort) for slots in (64, 256)
    ]
    if quick:  # the smallest of each workload
        return [full[0], Case("mixed", "hidden64", small(64), 16, mixed), letters[0]]
    return [*full, Case("mixed", "hidden128", small(128), 32, mixed), *letters]


def sglang_cases(size: str, slots: int) -> list[Case]:
    workloads: dict[str, Callable[[int, int], list[Job]]] = {
        "full_batch": full_batch,
        "mixed": mixed,
        "groups": lambda slots, seed: letter_sort(slots // 2, seed),
    }
    return [Case(name, size, SHAPES[size], slots, jobs) for name, jobs in workloads.items()]


async def measure(
    cases: Sequence[Case], arguments: argparse.Namespace
) -> dict[tuple[str, str, str], report.Metrics]:
    """Cases that follow each other with one model and as many slots share the engines."""
    records = {}
    for _, group in groupby(cases, key=lambda case: (case.shape, case.num_slots)):
        first, *others = group
        device = Device(arguments.device)
        async with started(first, arguments.against, device, arguments.sglang_python) as sides:
            for case in (first, *others):
                key = (case.model, case.workload, f"slots{case.num_slots}")
                records[key] = await sides.compare(case, arguments.rounds)
    return records


def main() -> None:
    parser = report.make_parser(__doc__, device=True)
    sglang_side.add_arguments(parser)
    parser.add_argument("--against", choices=("static", "sglang"), default="static", help="whom")
    parser.add_argument("--size", choices=tuple(SHAPES), help="of the model beside SGLang")
    parser.add_argument("--slots", type=int, default=32, help="of the engines beside SGLang")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds a row")
    arguments = report.parse(parser, rounds=1, slots=8)
    against, device = arguments.against, arguments.device
    if against == "sglang":
        sglang_side.check_python(parser, arguments.sglang_python)
        size = arguments.size or ("1m" if device == "cpu" else "0.5b")
        cases = sglang_cases(size, arguments.slots)
    else:
        cases = static_cases(device, quick=arguments.quick)
    torch.set_num_threads(1)
    records = asyncio.run(measure(cases, arguments))
    settings = {"rounds": arguments.rounds, "threads": 1, "device": device}
    report.print_records(
        f"Generation: LocalEngine against {against}",
        settings,
        ("model", "workload", "slots"),
        records,
    )
    metrics = report.flat(records)
    # the least favourable one counts
    wanted = {"local_over_static": "full_batch", "mixed_over_static": "mixed"}
    if against == "sglang":
        wanted = {"local_over_sglang": ""}
    for name, workload in wanted.items():
        ratios = [r[f"local_over_{against}"] for key, r in records.items() if workload in key[1]]
        if ratios:
            metrics[name] = min(ratios)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
