"""LocalEngine against plain static-batch loops over the same models.

    python benchmarks/generate_throughput.py [--quick] [--json FILE] [--device cuda]

Random weights, both sides timed alternately, medians; on a CPU three workloads of small models with
one thread a side, on a GPU full batches of a model of half a billion parameters in bfloat16:

- full batch: as many equal prompts as slots, completions of one length. The static loop pays for
  no padding, no joining, no bookkeeping: it is what batched decoding costs at least.
- mixed: prompts and completions of different lengths. The static loop takes batches in order of
  arrival, left-padded, and waits for the longest completion; tokens after a completion's end do
  not count.
- letter-sort: short prompts in groups of 8 and short completions, so that requests join and leave
  at nearly every step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import qwen2_models
import report
import torch
from cuda_device import peak_allocated, synchronize
from qwen2_models import NUM_WORDS, SHAPES, Shape
from transformers import DynamicCache, PreTrainedModel

from areal_sc.config.schema import Dtype, GenerationConfig, RolloutConfig
from areal_sc.engines.base import GenerationEngine
from areal_sc.engines.local.engine import LocalEngine


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


def static_batches(model: PreTrainedModel, jobs: Sequence[Job], num_slots: int) -> float:
    """Seconds for all jobs in batches of `num_slots`, in order of arrival."""
    start = time.perf_counter()
    with torch.device(model.device):
        for first in range(0, len(jobs), num_slots):
            static_batch(model, jobs[first : first + num_slots])
    return time.perf_counter() - start


async def with_engine(engine: GenerationEngine, jobs: Sequence[Job]) -> float:
    """Seconds for all jobs, given to the engine at once."""
    start = time.perf_counter()
    completions = await asyncio.gather(
        *(
            engine.generate(
                job.prompt,
                GenerationConfig(max_new_tokens=job.num_new_tokens),
                prefix_group=job.group,
            )
            for job in jobs
        )
    )
    elapsed_s = time.perf_counter() - start
    for job, completion in zip(jobs, completions, strict=True):
        assert len(completion.token_ids) == len(completion.logprobs) == job.num_new_tokens
    return elapsed_s


@dataclass(frozen=True)
class Case:
    """A row of the table."""

    workload: str
    shape: Shape
    num_slots: int
    make_jobs: Callable[[int], list[Job]]
    name: str

    async def compare(self, device: str, rounds: int) -> tuple[float, float]:
        """Median tokens/s of (LocalEngine, static loop), timed alternately on the same jobs."""
        dtype = Dtype.float32 if device == "cpu" else Dtype.bfloat16
        model = qwen2_models.build(self.shape, getattr(torch, dtype), device)
        config = RolloutConfig(
            path="",
            dtype=dtype,
            max_running_sequences=self.num_slots,
            max_context_tokens=1024,
            num_threads=1,
            seed=0,
        )
        tokenizer = qwen2_models.build_tokenizer(self.shape)
        engine = LocalEngine.from_model(model, tokenizer, config)
        await engine.start()
        ours, static = [], []
        for number in range(rounds + 1):
            jobs = self.make_jobs(number)
            num_tokens = sum(job.num_new_tokens for job in jobs)
            ours.append(num_tokens / await with_engine(engine, jobs))
            synchronize(device)
            static.append(num_tokens / static_batches(model, jobs, self.num_slots))
        await engine.close()
        return statistics.median(ours[1:]), statistics.median(static[1:])  # the first warms up


def full_batch(num_slots: int) -> Callable[[int], list[Job]]:
    def make(seed: int) -> list[Job]:
        rng = random.Random(seed)
        prompts = [[rng.randrange(NUM_WORDS) for _ in range(32)] for _ in range(num_slots)]
        return [Job(prompt, 128) for prompt in prompts]

    return make


def mixed(num_slots: int) -> Callable[[int], list[Job]]:
    """Lognormal completion lengths: median 48, sigma 0.8, at most 384."""

    def make(seed: int) -> list[Job]:
        rng = random.Random(seed)
        return [
            Job(
                [rng.randrange(NUM_WORDS) for _ in range(rng.randrange(4, 64))],
                max(1, min(384, round(48 * rng.lognormvariate(0, 0.8)))),
            )
            for _ in range(4 * num_slots)
        ]

    return make


def letter_sort(num_slots: int) -> Callable[[int], list[Job]]:
    """n letters and `=`, answered by n letters and `$`; n lognormal, median 7, 2..26."""

    def make(seed: int) -> list[Job]:
        rng = random.Random(seed)
        jobs = []
        for group in range(num_slots):
            n = max(2, min(26, round(7 * rng.lognormvariate(0, 0.6))))
            prompt = [rng.randrange(30) for _ in range(n + 1)]
            jobs += [Job(prompt, n + 1, f"{seed}/{group}") for _ in range(8)]
        return jobs

    return make


def cases_of(device: str, *, quick: bool) -> list[Case]:
    def small(hidden: int, layers: int = 2, vocabulary: int = NUM_WORDS) -> Shape:
        return Shape(hidden, 256 if hidden == 96 else 4 * hidden, layers, 4, 2, vocabulary)

    if device == "cuda":
        return [
            Case("full batch", SHAPES["0.5b"], slots, full_batch(slots), "0.5b")
            for slots in (64, 256)
        ]
    full = [
        Case("full batch", small(hidden), 32, full_batch(32), f"hidden{hidden}")
        for hidden in (64, 128, 256)
    ]
    letters = [
        Case("letter-sort", small(96, 3, 30), slots, letter_sort(slots), "hidden96")
        for slots in (64, 256)
    ]
    if quick:  # the smallest of each workload
        return [full[0], Case("mixed", small(64), 16, mixed(16), "hidden64"), letters[0]]
    return [*full, Case("mixed", small(128), 32, mixed(32), "hidden128"), *letters]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    report.add_device(parser)
    parser.add_argument("--rounds", type=int, help="timed rounds a row (default 9, quick 1)")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 9)
    torch.set_num_threads(1)
    rows: list[tuple[str, str, int, float, float, float]] = []
    metrics: dict[str, tuple[float, str]] = {}
    for case in cases_of(arguments.device, quick=arguments.quick):
        rates: list[float] = []

        def run(case: Case = case, rates: list[float] = rates) -> None:
            rates.extend(asyncio.run(case.compare(arguments.device, rounds)))

        peak_bytes = peak_allocated(arguments.device, run)
        ours, static = rates
        rows.append((case.workload, case.name, case.num_slots, ours, static, ours / static))
        workload = case.workload.replace(" ", "_").replace("-", "_")
        key = f"{workload}_{case.name}_slots{case.num_slots}"
        metrics[f"{key}_tokens_per_s"] = (ours, "tokens/s")
        metrics[f"{key}_static_tokens_per_s"] = (static, "tokens/s")
        metrics[f"{key}_over_static"] = (ours / static, "ratio")
        if arguments.device == "cuda":
            metrics[f"{key}_peak_bytes"] = (peak_bytes, "B")
    # the least favourable model counts
    for name, workload in (("local", "full batch"), ("mixed", "mixed")):
        ratios = [row[-1] for row in rows if row[0] == workload]
        if ratios:
            metrics[f"{name}_over_static"] = (min(ratios), "ratio")
    report.print_table(
        "Generation: LocalEngine against static batches",
        {"rounds": rounds, "threads": 1, "device": arguments.device},
        ("workload", "model", "slots", "LocalEngine tok/s", "static tok/s", "ratio"),
        rows,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
