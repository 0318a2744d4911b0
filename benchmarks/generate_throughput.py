"""LocalEngine against plain static-batch loops over the same models.

    python benchmarks/generate_throughput.py [--quick] [--json FILE]

Three workloads, random weights, one thread a side, both sides timed alternately, medians:

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

import report
import torch
from tokenizers import Tokenizer, models
from transformers import (
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from areal_sc.config.schema import Dtype, GenerationConfig, RolloutConfig
from areal_sc.engines.local.engine import LocalEngine

VOCABULARY = 512


@dataclass(frozen=True)
class Job:
    """One completion of exactly `num_new_tokens` tokens."""

    prompt: list[int]
    num_new_tokens: int
    group: str | None = None


def build_model(hidden: int, layers: int, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=256 if hidden == 96 else 4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without EOS: completions end by length alone."""
    words = models.WordLevel({f"t{i}": i for i in range(VOCABULARY)}, unk_token="t0")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))


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
    for first in range(0, len(jobs), num_slots):
        static_batch(model, jobs[first : first + num_slots])
    return time.perf_counter() - start


async def with_engine(engine: LocalEngine, jobs: Sequence[Job]) -> float:
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
    elapsed = time.perf_counter() - start
    for job, completion in zip(jobs, completions, strict=True):
        assert len(completion.token_ids) == job.num_new_tokens, completion.finish_reason
    return elapsed


async def compare(
    model: PreTrainedModel, make_jobs: Callable[[int], list[Job]], num_slots: int, rounds: int
) -> tuple[float, float]:
    """Median tokens/s of (LocalEngine, static loop), timed alternately on the same jobs."""
    config = RolloutConfig(
        path="",
        dtype=Dtype.float32,
        max_running_sequences=num_slots,
        max_context_tokens=1024,
        num_threads=1,
        seed=0,
    )
    engine = LocalEngine.from_model(model, build_tokenizer(), config)
    await engine.start()
    ours, static = [], []
    for i in range(rounds + 1):
        jobs = make_jobs(i)
        num_tokens = sum(job.num_new_tokens for job in jobs)
        rates = (
            num_tokens / await with_engine(engine, jobs),
            num_tokens / static_batches(model, jobs, num_slots),
        )
        if i > 0:  # the first round warms up
            ours.append(rates[0])
            static.append(rates[1])
    await engine.close()
    return statistics.median(ours), statistics.median(static)


def full_batch(num_slots: int) -> Callable[[int], list[Job]]:
    def make(seed: int) -> list[Job]:
        rng = random.Random(seed)
        prompts = [[rng.randrange(VOCABULARY) for _ in range(32)] for _ in range(num_slots)]
        return [Job(prompt, 128) for prompt in prompts]

    return make


def mixed(num_slots: int) -> Callable[[int], list[Job]]:
    """Lognormal completion lengths: median 48, sigma 0.8, at most 384."""

    def make(seed: int) -> list[Job]:
        rng = random.Random(seed)
        return [
            Job(
                [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4, 64))],
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    parser.add_argument("--rounds", type=int, help="timed rounds a row (default 9, quick 1)")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 9)
    torch.set_num_threads(1)

    cases = [("full batch", hidden, 2, 32, full_batch(32), VOCABULARY) for hidden in (64, 128, 256)]
    cases.append(("mixed", 128, 2, 32, mixed(32), VOCABULARY))
    cases += [("letter-sort", 96, 3, slots, letter_sort(slots), 30) for slots in (64, 256)]
    if arguments.quick:  # the smallest of each workload
        cases = [cases[0], ("mixed", 64, 2, 16, mixed(16), VOCABULARY), cases[4]]
    rows, metrics = [], {}
    for workload, hidden, layers, num_slots, make_jobs, vocabulary in cases:
        model = build_model(hidden, layers, vocabulary)
        ours, static = asyncio.run(compare(model, make_jobs, num_slots, rounds))
        rows.append((workload, hidden, layers, num_slots, ours, static, ours / static))
        key = f"{workload.replace(' ', '_').replace('-', '_')}_hidden{hidden}_slots{num_slots}"
        metrics[f"{key}_tokens_per_s"] = (ours, "tokens/s")
        metrics[f"{key}_static_tokens_per_s"] = (static, "tokens/s")
        metrics[f"{key}_over_static"] = (ours / static, "ratio")
    # the least favourable model counts
    metrics["local_over_static"] = (min(row[-1] for row in rows if row[0] == "full batch"), "ratio")
    metrics["mixed_over_static"] = (min(row[-1] for row in rows if row[0] == "mixed"), "ratio")
    report.print_table(
        "Generation: LocalEngine against static batches",
        {"rounds": rounds, "threads": 1, "dtype": "float32", "vocabulary": "512 (letter-sort 30)"},
        ("workload", "hidden", "layers", "slots", "LocalEngine tok/s", "static tok/s", "ratio"),
        rows,
    )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
