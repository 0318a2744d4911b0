"""A training step whose rows share their prompts, against one that computes each row by itself.

    python benchmarks/shared_prefixes.py [--quick] [--json FILE] [--device cuda]

One step is: recompute the log-probabilities of the trained tokens, then one PPO update. Random
weights, FSDP's engine in this process with one thread. The same rows are computed in both ways, by
turns. `times_faster` is the median of the rounds' ratios of CPU seconds: something else that runs
on the machine moves it less than the time that passes. `shared_token_share` is that of the update,
`num_micro_batches` are those of both ways. Shapes: 8 answers of 64 tokens behind a prompt of 448;
of 500 behind 3,000, as of an agent with tools; of 200 behind 100, twice; and the first one with
another prompt for each row. On a GPU the model has the shape of Qwen2-0.5B, in bfloat16, and what
counts are seconds.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import PropertyMock, patch

import report
import torch
from qwen2_models import SHAPES, Shape
from random_model_run import model_folder
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

MODEL = Shape(256, 704, 4, 4, 2, 2048)
MAX_TOKENS = 16384


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
        for case in QUICK_CASES if arguments.quick else CASES:
            report.say(case.name)
            records[(case.name,)] = measure(case, sides, arguments.rounds, model.vocabulary)
        for side in sides:
            side.engine.close()
    settings = {"rounds": arguments.rounds, "model": model, "max_tokens": MAX_TOKENS}
    report.print_records("Rows that share their prompts", settings, ("rows",), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
