"""A training step whose rows share their prompts, against one that computes each row by itself.

    python benchmarks/shared_prefixes.py [--quick] [--json FILE] [--device cuda]

One step is: recompute the log-probabilities of the trained tokens, then one PPO update. Random
weights, FSDP's engine in this process with one thread. The same rows are computed in both ways, by
turns. `times_faster` is the median of the rounds' ratios of CPU seconds: something else that runs
on the machine moves it less than the time that passes. `shared_token_share` is that of the update,
`num_micro_batches` are those of both ways, `peak_mb` the most memory that a step takes, beside what
there is before it. Shapes: 8 answers of 64 tokens behind a prompt of 448;
of 500 behind 3,000, as of an agent with tools; of 200 behind 100, twice; and the first one with
another prompt for each row. On a GPU the model has the shape of Qwen2-0.5B, in bfloat16, and what
counts are seconds.

`ranks`: random batches of 16 groups of these shapes, spread over ranks as a controller does it.
What the rank computes that has most to do, over the nth part of what one rank would compute:
`balanced`, ranks get equally much to compute, a group's prompt once; `by_row_tokens`, they get rows
of equally many tokens. Nothing is computed for it.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import PropertyMock, patch

import report
import torch
from cuda_device import peak_allocated
from processes import memory_growth, resident_bytes
from qwen2_models import SHAPES, Shape
from random_model_run import model_folder
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.transport.packed_rows import PackedRows

MODEL = Shape(256, 704, 4, 4, 2, 2048)
MAX_TOKENS = 16384
NUM_GROUPS = 16
M_MMAP_THRESHOLD = -3
"""Of glibc: larger pieces of memory go back to the system as soon as they are freed."""


@dataclass(frozen=True)
class Case:
    """Rows of a minibatch: groups of answers, each group behind one prompt."""

    name: str
    groups: int
    answers: int
    answer_tokens: int
    prompt_tokens: int
    shares: bool = True

    def rows(self, vocabulary: int) -> PackedRows:
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randint(vocabulary, shape, generator=generator)

        size = (self.groups, self.answers)
        prompts = draw(*size, self.prompt_tokens)
        if self.shares:
            prompts = prompts[:, :1].expand(prompts.shape)
        tokens = torch.cat([prompts, draw(*size, self.answer_tokens)], -1).flatten(0, 1)
        is_answer = torch.arange(tokens.shape[1]) >= self.prompt_tokens
        fields = {
            "input_ids": tokens.flatten().int(),
            "loss_mask": is_answer.expand(tokens.shape).flatten(),
            "behavior_logprobs": torch.full((tokens.numel(),), -math.log(vocabulary)),
        }
        advantages = torch.randn(len(tokens), generator=generator).tolist()
        return PackedRows(fields, (tokens.shape[1],) * len(tokens), tuple(advantages))


CASES = [
    Case("prompt_448", 1, 8, 64, 448),
    Case("tools_3000", 1, 8, 500, 3000),
    Case("gsm8k", 2, 8, 200, 100),
    Case("nothing_shared", 1, 8, 64, 448, shares=False),
]
QUICK_CASES = [
    Case("two_answers", 1, 2, 8, 56),
    Case("nothing_shared", 1, 2, 8, 56, shares=False),
]


class Side:
    """An engine that shares, or does not."""

    def __init__(self, folder: Path, device: str, *, shares: bool) -> None:
        self._shares = shares
        self._is_cuda = device == "cuda"
        optimizer = OptimizerConfig(lr=1e-6, total_steps=1000)
        config = ActorConfig(
            path=str(folder),
            device=Device(device),
            dtype=Dtype.bfloat16 if self._is_cuda else Dtype.float32,
            num_threads=1,
            max_tokens_per_micro_batch=MAX_TOKENS,
            optimizer=optimizer,
        )
        self.engine = FSDPEngine(config)
        self.engine.initialize(0, 1, "")

    def step(self, rows: PackedRows) -> tuple[float, dict[str, float]]:
        """CPU seconds of a step, of a GPU seconds; and what the update reports."""
        never = PropertyMock(return_value=math.inf)
        clock = time.perf_counter if self._is_cuda else time.process_time
        start = clock()
        if self._shares:
            metrics = self._step(rows)
        else:
            with patch.object(FSDPEngine, "_min_saved_tokens", never):
                metrics = self._step(rows)
        if self._is_cuda:
            torch.cuda.synchronize()
        return clock() - start, metrics

    def peak_bytes(self, rows: PackedRows) -> int:
        """Memory that a step takes at most, beside what there is before it."""
        if self._is_cuda:
            return peak_allocated("cuda", lambda: self.step(rows))
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 16)
        libc.malloc_trim(0)
        with memory_growth(os.getpid(), resident_bytes(os.getpid())) as growth:
            self.step(rows)
        return growth["private"]

    def _step(self, rows: PackedRows) -> dict[str, float]:
        proximal = self.engine.forward(rows, "logprobs")
        fields = {**rows.fields, "proximal_logprobs": proximal}
        given = PackedRows(fields, rows.lengths, rows.advantages)
        return self.engine.update([given], loss_of(self.engine.config.ppo), step=1)


def measure(case: Case, sides: tuple[Side, Side], rounds: int, vocabulary: int) -> report.Metrics:
    rows = case.rows(vocabulary)
    ratios, spent = [], list[float]()
    for number in range(rounds + 1):  # the first one warms up
        turn = sides if number % 2 else sides[::-1]
        found = {side: side.step(rows) for side in turn}
        (shared_s, shared), (apart_s, apart) = (found[side] for side in sides)
        if number:
            ratios.append(apart_s / shared_s)
            spent.append(shared_s)
    return {
        "times_faster": statistics.median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "step_s": statistics.median(spent),
        "shared_token_share": shared["shared_token_share"],
        "num_micro_batches": shared["num_micro_batches"],
        "num_micro_batches_apart": apart["num_micro_batches"],
    }


def compare_memory(case: Case, sides: tuple[Side, Side], vocabulary: int) -> report.Metrics:
    """After the times: it makes allocations slower."""
    shared, apart = (side.peak_bytes(case.rows(vocabulary)) for side in sides)
    return {"peak_mb": shared / 1e6, "apart_peak_mb": apart / 1e6, "times_less": apart / shared}


def balance(case: Case, num_ranks: int, num_batches: int) -> report.Metrics:
    """Means over batches whose prompts and answers have random lengths."""
    found: dict[str, list[float]] = {"balanced": [], "by_row_tokens": []}
    for seed in range(num_batches):
        chance = random.Random(seed)
        rows = list[RowMetadata]()
        for group in range(NUM_GROUPS):
            prompt = round(case.prompt_tokens * chance.lognormvariate(0, 0.3))
            for episode in range(8):
                length = prompt + max(1, round(case.answer_tokens * chance.lognormvariate(0, 0.5)))
                row = RowMetadata(group, 0, length, 0.0, 0, (), episode, prompt_length=prompt)
                rows.append(row)
        batch = BatchMetadata("batch", 0, (), tuple(rows))
        for name, min_saved in (("balanced", 1.0), ("by_row_tokens", math.inf)):
            parts = batch.partition(num_ranks, min_saved_tokens=min_saved)
            most = max(_num_computed([rows[row] for row in part]) for part in parts)
            found[name].append(most * num_ranks / _num_computed(rows))
    return {name: statistics.fmean(ratios) for name, ratios in found.items()}


def _num_computed(rows: list[RowMetadata]) -> int:
    prompts = {row.group_id: row.prompt_length for row in rows}
    return sum(row.sequence_length - row.prompt_length for row in rows) + sum(prompts.values())


def main() -> None:
    parser = report.make_parser(__doc__, device=True)
    parser.add_argument("--rounds", type=int, default=12, help="pairs of steps a shape")
    arguments = report.parse(parser, rounds=1)
    hf_logging.disable_progress_bar()
    model = SHAPES["0.5b"] if arguments.device == "cuda" else MODEL
    with model_folder(model, Dtype.float32) as folder:
        sides = (
            Side(folder, arguments.device, shares=True),
            Side(folder, arguments.device, shares=False),
        )
        records = {}
        cases = QUICK_CASES if arguments.quick else CASES
        for case in cases:
            report.say(case.name)
            records[(case.name,)] = measure(case, sides, arguments.rounds, model.vocabulary)
        for case in cases:
            records[(case.name,)] |= compare_memory(case, sides, model.vocabulary)
        for side in sides:
            side.engine.close()
    settings = {"rounds": arguments.rounds, "model": model, "max_tokens": MAX_TOKENS}
    report.print_records("Rows that share their prompts", settings, ("rows",), records)
    ranks = {
        (case.name, f"{num_ranks}_ranks"): balance(case, num_ranks, 2 if arguments.quick else 100)
        for case in CASES
        for num_ranks in (2, 4, 8)
        if case.shares
    }
    report.print_records("Over ranks", {"groups": NUM_GROUPS}, ("rows", "ranks"), ranks)
    report.write(report.flat(records | ranks), arguments.json)


if __name__ == "__main__":
    main()
