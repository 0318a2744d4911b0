"""The training step against a hand-written torch loop, and against other ways of micro-batching.

    python benchmarks/train_throughput.py [--quick] [--json FILE] [--device cuda]

One training step is: recompute the log-probabilities of the trained tokens, then one PPO update for
each of two minibatches. Random weights, heavy-tailed lengths, one thread a side; the sides take
turns, and a ratio is the median of those of the rounds.

- controller: a step as a run takes it: TrainController calls a train worker in another process,
  which pulls the rows from a rollout worker, seals the log-probabilities, and trains. The weights
  are published between the rounds. What it costs beyond the engine is RPC, metadata, pulls.
- dynamic: the engine alone, in this process, with the micro-batches that the worker makes.
- handwritten: the same arithmetic as a plain loop over the Hugging Face model, written out: the
  same packed micro-batches, one attention call a row, full logits of the trained tokens,
  `clip_grad_norm_`, fused AdamW.
- fixed: packed micro-batches of equal numbers of rows, so many that any choice of rows, the
  longest ones included, still fits the same token budget.
- padded: the same budget in padded tokens.
- all_tokens: the log-probabilities of prompts are recomputed, too; with long prompts alone.

`..._cpu` is the ratio of CPU seconds, of this process and the worker together: it says less about
waiting, and more when something else runs on the machine.

The letter-sort workload is the small model of the quickstart.

On a GPU controller, dynamic, fixed and handwritten train a model of half a billion parameters in
bfloat16 over float32 parameters and AdamW state, each with memory of its own. `share_of_peak` is
model FLOPs a second over the data sheet's rate.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path

import report
import torch
from cuda_device import peak_allocated, peak_bf16_flops
from random_model_run import model_folder
from train_handwritten import HandwrittenLoop
from train_through_controller import ControllerSide, controller_side
from train_workload import (
    LEARNING_RATE,
    NUM_MINIBATCHES,
    Workload,
    gpu_workload,
    make_rows,
    minibatches_of,
    workloads,
)
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.ppo_settings import NormScope, PPOConfig
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.engines.training.updates.micro_batches import RowUnits
from areal_sc.transport.packed_rows import PackedRows

Step = Callable[[], object]


def actor_config(workload: Workload, model: Path, device: str) -> ActorConfig:
    return ActorConfig(
        path=str(model),
        device=Device(device),
        dtype=Dtype.float32 if device == "cpu" else Dtype.bfloat16,
        max_tokens_per_micro_batch=workload.max_tokens,
        seed=0,
        optimizer=OptimizerConfig(lr=LEARNING_RATE, total_steps=100),
        ppo=PPOConfig(
            num_minibatches=NUM_MINIBATCHES,
            advantage="none",  # the rows' rewards are their advantages
            advantage_std=NormScope.none,
        ),
    )


def engine_step(engine: FSDPEngine, workload: Workload) -> Step:
    """A step of ours; whatever drives an engine may take the place of this function."""
    engine.initialize(0, 1, "")
    rows, loss = make_rows(workload), loss_of(engine.config.ppo)

    def step() -> None:
        proximal = engine.forward(rows, "logprobs")
        known = replace(rows, fields={**rows.fields, "proximal_logprobs": proximal})
        engine.update([known.take(part) for part in minibatches_of(rows)], loss, step=0)

    return step


class FixedRowsEngine(FSDPEngine):
    """Equal numbers of rows a micro-batch, in the order of the rows, safe for any rows."""

    def _pack(self, units: RowUnits, count: int) -> list[list[list[int]]]:
        """The rows have nothing in common: each is a unit."""
        rows, size = units.units, self.rows_a_micro_batch(units.lengths)
        return [rows[start : start + size] for start in range(0, len(rows), size)]

    def rows_a_micro_batch(self, lengths: Sequence[int]) -> int:
        budget = self.config.max_tokens_per_micro_batch
        return sum(total <= budget for total in accumulate(sorted(lengths, reverse=True)))


class PaddedEngine(FixedRowsEngine):
    """Rows padded to the longest of their micro-batch; the budget counts the padding."""

    def initialize(self, rank: int, world_size: int, init_method: str) -> None:
        super().initialize(rank, world_size, init_method)
        self._model.abilities = replace(self._model.abilities, packs=False)

    def rows_a_micro_batch(self, lengths: Sequence[int]) -> int:
        return self.config.max_tokens_per_micro_batch // max(lengths)


@dataclass
class Times:
    """What one side took in each round, and on a GPU at most beyond what it had, in bytes."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def measure(
    steps: dict[str, Step], rounds: int, controller: ControllerSide, device: str
) -> dict[str, Times]:
    """Times the sides, which take turns, after one round to warm up."""
    sides = {name: Times() for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            cpu_before, before = controller.cpu_s(), time.perf_counter()
            sides[name].peak_bytes = peak_allocated(device, step)
            wall_s, cpu_s = time.perf_counter() - before, controller.cpu_s() - cpu_before
            if number:
                sides[name].wall_s.append(wall_s)
                sides[name].cpu_s.append(cpu_s)
        controller.publish()
    return sides


def ratio(ours: Sequence[float], other: Sequence[float]) -> float:
    """Throughput of ours over that of the other, median over the rounds."""
    return statistics.median(theirs / mine for mine, theirs in zip(ours, other, strict=True))


class AllTokensEngine(FSDPEngine):
    """Recomputes the log-probabilities of every token, which need the logits of every token."""

    def forward(self, rows: PackedRows, output: str) -> torch.Tensor:
        everything = torch.ones(rows.num_tokens, dtype=torch.bool)
        return super().forward(
            replace(rows, fields={**rows.fields, "loss_mask": everything}), output
        )


ENGINES: dict[str, type[FSDPEngine]] = {
    "dynamic": FSDPEngine,
    "fixed": FixedRowsEngine,
    "padded": PaddedEngine,
    "all_tokens": AllTokensEngine,
}


@dataclass(frozen=True)
class Case:
    """A table: one workload, and the sides that are compared on it."""

    prefix: str
    workload: Workload
    rounds: int
    sides: Sequence[str]
    device: str = "cpu"

    def measure(self) -> dict[str, Times]:
        with model_folder(self.workload.shape, Dtype.float32) as model:
            config = actor_config(self.workload, model, self.device)
            with controller_side(config, make_rows(self.workload)) as controller:
                dtype = getattr(torch, config.dtype)
                by_hand = HandwrittenLoop(self.workload, model, self.device, dtype)
                steps = {"controller": controller.step, "handwritten": by_hand.step}
                for side in self.sides:
                    steps[side] = engine_step(ENGINES[side](config), self.workload)
                return measure(steps, self.rounds, controller, self.device)

    def metrics(self, times: dict[str, Times]) -> report.Metrics:
        by_hand, dynamic, controller = (
            times[side] for side in ("handwritten", "dynamic", "controller")
        )
        metrics = {
            "step_vs_handwritten": ratio(controller.wall_s, by_hand.wall_s),
            "step_vs_handwritten_cpu": ratio(controller.cpu_s, by_hand.cpu_s),
            "engine_step_vs_handwritten": ratio(dynamic.wall_s, by_hand.wall_s),
        }
        for side in self.sides[1:]:
            metrics[f"dynamic_over_{side}"] = ratio(dynamic.wall_s, times[side].wall_s)
        seconds = {side: statistics.median(found.wall_s) for side, found in times.items()}
        for side in times:
            metrics[f"{side}_tokens_per_s"] = self.workload.num_tokens / seconds[side]
        if self.device == "cuda":
            flops, sheet = self.workload.model_flops(), peak_bf16_flops("cuda")
            for side, found in times.items():
                if sheet:
                    metrics[f"{side}_share_of_peak"] = flops / seconds[side] / sheet
                metrics[f"{side}_step_peak_bytes"] = found.peak_bytes
        return metrics

    def settings(self) -> dict[str, object]:
        return {
            "rows": len(self.workload.lengths),
            "tokens": self.workload.num_tokens,
            "longest": max(self.workload.lengths),
            "minibatches": NUM_MINIBATCHES,
            "micro-batch budget": self.workload.max_tokens,
            "rounds": self.rounds,
            "device": "one thread a side" if self.device == "cpu" else self.device,
        }


def cases_of(device: str, *, quick: bool) -> list[Case]:
    if device == "cuda":
        rounds = 3 if quick else 7
        return [Case("gpu_", gpu_workload(quick=quick), rounds, ("dynamic", "fixed"), "cuda")]
    few, many = (1, 2) if quick else (9, 27)  # steps of the small model are short
    sides = ("dynamic", "fixed", "padded")[: 2 if quick else 3]
    wide, letters, prompts = workloads(quick=quick)
    cases = [
        Case("", wide, few, sides),
        Case("letter_sort_", letters, many, sides),
        Case("long_prompts_", prompts, few, ("dynamic", "all_tokens")),
    ]
    return cases[:2] if quick else cases


def main() -> None:
    arguments = report.make_parser(__doc__, device=True).parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    metrics: report.Metrics = {}
    for case in cases_of(arguments.device, quick=arguments.quick):
        found = case.metrics(case.measure())
        report.print_metrics(f"Training step, {case.workload.name}", case.settings(), found)
        metrics |= {case.prefix + name: value for name, value in found.items()}
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
