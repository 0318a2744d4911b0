"""The training step against a hand-written torch loop, and against other ways of micro-batching.

    python benchmarks/train_throughput.py [--quick] [--json FILE] [--device cuda]

One training step is: recompute the log-probabilities of the trained tokens, then one PPO update for
each of two minibatches. Random weights, heavy-tailed lengths, one thread a rank; the sides take
turns, and a ratio is the median of those of the rounds.

- controller: a step as a run takes it: TrainController calls a train worker in another process,
  which pulls the rows from this one, seals the log-probabilities, and trains. The weights are
  published between the rounds. What it costs beyond the engine is RPC, metadata, pulls.
- dynamic: the engine alone, in this process, with the micro-batches that the worker makes.
- handwritten: the same arithmetic as a plain loop over the Hugging Face model, written out: the
  same packed micro-batches, one attention call a row, full logits of the trained tokens,
  `clip_grad_norm_`, fused AdamW.
- fixed: packed micro-batches of equal numbers of rows, so many that any choice of rows, the
  longest ones included, still fits the same token budget; `fixed_lucky` knows the rows of each
  micro-batch beforehand, and takes as many as fit in this very order.
- padded: the same budget in padded tokens.
- all_tokens: the log-probabilities of prompts are recomputed, too; with long prompts alone.

`..._cpu` is the ratio of CPU seconds, of this process and the worker together: it says less about
waiting, and more when something else runs on the machine.

The ways of micro-batching are compared with one rank, where a micro-batch more costs next to
nothing on a CPU, and with two FSDP ranks, where it costs collectives, and where each waits for the
rank with more tokens; `--quick` leaves the latter out. The letter-sort workload is the small model
of the quickstart.

On a GPU controller, dynamic and handwritten train a model of half a billion parameters in bfloat16
over float32 parameters and AdamW state. `share_of_peak` is model FLOPs a second over the data
sheet's rate, `share_of_matmul` over that of a large matrix product on the same machine.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import report
import torch
from cuda_device import matmul_flops, peak_allocated, peak_bf16_flops
from train_handwritten import HandwrittenLoop
from train_through_controller import controller_side
from train_workload import (
    LEARNING_RATE,
    NUM_MINIBATCHES,
    Workload,
    gpu_workload,
    make_rows,
    minibatches_of_rank,
    workloads,
)
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.schema import ActorConfig, Device, Dtype, OptimizerConfig, PPOConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

Step = Callable[[], None]


def actor_config(workload: Workload, folder: Path, device: str = "cpu") -> ActorConfig:
    return ActorConfig(
        path=str(folder),
        device=Device(device),
        dtype=Dtype.float32 if device == "cpu" else Dtype.bfloat16,
        max_tokens_per_micro_batch=workload.max_tokens,
        seed=0,
        optimizer=OptimizerConfig(lr=LEARNING_RATE, total_steps=100),
        ppo=PPOConfig(num_minibatches=NUM_MINIBATCHES),
    )


def engine_step(
    engine: FSDPEngine, workload: Workload, rank: int = 0, world_size: int = 1, address: str = ""
) -> Step:
    """A step of ours; whatever drives an engine may take the place of this function."""
    engine.initialize(rank, world_size, address)
    rows, loss = make_rows(workload), loss_of(engine.config.ppo)
    minibatches = minibatches_of_rank(rows, rank, world_size)
    own = rows.take([row for minibatch in minibatches for row in minibatch])
    ends = list(accumulate(len(minibatch) for minibatch in minibatches))

    def step() -> None:
        proximal = engine.forward(own, "logprobs")
        known = replace(own, fields={**own.fields, "proximal_logprobs": proximal})
        parts = [known.take(range(start, end)) for start, end in pairwise([0, *ends])]
        engine.update(parts, loss, step=0)

    return step


def in_order(chosen: Sequence[int], size: int) -> list[Sequence[int]]:
    return [chosen[start : start + size] for start in range(0, len(chosen), size)]


class FixedRowsEngine(FSDPEngine):
    """Equal numbers of rows a micro-batch, in the order of the rows, safe for any rows."""

    def _pack(self, rows: PackedRows, chosen: Sequence[int], count: int) -> list[list[int]]:
        if not chosen:
            return [[] for _ in range(count)]
        parts = in_order(chosen, self.rows_a_micro_batch(rows, chosen))
        return [*map(list, parts), *([] for _ in range(count - len(parts)))]

    def rows_a_micro_batch(self, rows: PackedRows, chosen: Sequence[int]) -> int:
        longest_first = sorted((rows.lengths[row] for row in chosen), reverse=True)
        budget = self.config.max_tokens_per_micro_batch
        return sum(total <= budget for total in accumulate(longest_first))


class LuckyFixedRowsEngine(FixedRowsEngine):
    """As many rows as fit for these rows in this order."""

    def rows_a_micro_batch(self, rows: PackedRows, chosen: Sequence[int]) -> int:
        budget = self.config.max_tokens_per_micro_batch
        return max(
            size
            for size in range(1, len(chosen) + 1)
            if all(sum(rows.lengths[r] for r in part) <= budget for part in in_order(chosen, size))
        )


class PaddedEngine(FixedRowsEngine):
    """Rows padded to the longest of their micro-batch; the budget counts the padding."""

    def initialize(self, rank: int, world_size: int, init_method: str) -> None:
        super().initialize(rank, world_size, init_method)
        self._model.abilities = replace(self._model.abilities, packs=False)

    def rows_a_micro_batch(self, rows: PackedRows, chosen: Sequence[int]) -> int:
        return self.config.max_tokens_per_micro_batch // max(rows.lengths[row] for row in chosen)


@dataclass(frozen=True)
class Times:
    """What every side took in every round, and on a GPU at most beyond what it had: bytes."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]
    peak_bytes: dict[str, int]


def measure(
    steps: dict[str, Step],
    rounds: int,
    *,
    device: str = "cpu",
    after_round: Step = lambda: None,
    cpu_clock: Callable[[], float] = time.process_time,
) -> Times:
    """Times the sides, which take turns, after one round to warm up.

    Args:
        steps: side -> a step of it.
        rounds: how often each side is timed.
        after_round: runs untimed.
        cpu_clock: CPU seconds so far of all processes that a step may use.
    """
    times = Times({name: [] for name in steps}, {name: [] for name in steps}, {})
    for number in range(rounds + 1):
        for name, step in steps.items():
            cpu_before, before = cpu_clock(), time.perf_counter()
            times.peak_bytes[name] = peak_allocated(device, step)
            wall_s, cpu_s = time.perf_counter() - before, cpu_clock() - cpu_before
            if number:
                times.wall_s[name].append(wall_s)
                times.cpu_s[name].append(cpu_s)
        after_round()
    return times


def ratio(seconds: dict[str, list[float]], ours: str, other: str) -> float:
    """Throughput of `ours` over that of `other`, median over the rounds."""
    pairs = zip(seconds[ours], seconds[other], strict=True)
    return statistics.median(theirs / mine for mine, theirs in pairs)


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
    "fixed_lucky": LuckyFixedRowsEngine,
    "padded": PaddedEngine,
    "all_tokens": AllTokensEngine,
}


def measure_one_rank(
    workload: Workload, folder: Path, sides: Sequence[str], rounds: int, device: str = "cpu"
) -> Times:
    config = actor_config(workload, folder, device)
    rows = make_rows(workload)
    in_minibatch_order = [row for part in minibatches_of_rank(rows, 0, 1) for row in part]
    with controller_side(config, rows.take(in_minibatch_order), folder / "run") as controller:
        by_hand = HandwrittenLoop(workload, folder, device, getattr(torch, config.dtype))
        steps: dict[str, Step] = {"controller": controller.step, "handwritten": by_hand.step}
        for side in sides:
            steps[side] = engine_step(ENGINES[side](config), workload)
        return measure(
            steps,
            rounds,
            device=device,
            after_round=controller.publish,
            cpu_clock=controller.cpu_s,
        )


def measure_two_ranks(workload: Workload, folder: Path, sides: Sequence[str], rounds: int) -> Times:
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    first = context.Process(target=run_rank, args=(0, workload, folder, sides, rounds, "", sender))
    first.start()
    second = context.Process(
        target=run_rank, args=(1, workload, folder, sides, rounds, receiver.recv(), None)
    )
    second.start()
    sender.close()  # so that a rank that fails ends the wait
    times: Times = receiver.recv()
    first.join()
    second.join()
    return times


def run_rank(
    rank: int,
    workload: Workload,
    folder: Path,
    sides: Sequence[str],
    rounds: int,
    address: str,
    sender: Any,
) -> None:
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    engines = {side: ENGINES[side](actor_config(workload, folder)) for side in sides}
    if rank == 0:
        address = engines["dynamic"].create_rendezvous()  # the first to start; the others join it
        sender.send(address)
    steps = {
        name: engine_step(engine, workload, rank, 2, address) for name, engine in engines.items()
    }
    times = measure(steps, rounds)
    if rank == 0:
        sender.send(times)
    for engine in engines.values():
        engine.close()


@dataclass(frozen=True)
class Case:
    """A table: one workload, and the sides that are compared on it."""

    prefix: str
    workload: Workload
    num_ranks: int
    rounds: int
    sides: Sequence[str]
    device: str = "cpu"

    def measure(self) -> Times:
        with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
            folder = Path(name)
            self.workload.save_model(folder)
            if self.num_ranks == 2:
                return measure_two_ranks(self.workload, folder, self.sides, self.rounds)
            return measure_one_rank(self.workload, folder, self.sides, self.rounds, self.device)

    def metrics(self, times: Times) -> report.Metrics:
        metrics: dict[str, tuple[float, str]] = {}
        if self.num_ranks == 1:
            for name, ours, clock in (
                ("step_vs_handwritten", "controller", times.wall_s),
                ("step_vs_handwritten_cpu", "controller", times.cpu_s),
                ("engine_step_vs_handwritten", "dynamic", times.wall_s),
            ):
                metrics[name] = (ratio(clock, ours, "handwritten"), "x")
        for side in self.sides[1:]:
            metrics[f"dynamic_over_{side}"] = (ratio(times.wall_s, "dynamic", side), "x")
        seconds = statistics.median(times.wall_s["dynamic"])
        metrics["tokens_per_s"] = (self.workload.num_tokens / seconds, "tokens/s")
        if self.device == "cuda":
            flops, sheet = self.workload.model_flops(), peak_bf16_flops("cuda")
            reached = matmul_flops("cuda", torch.bfloat16)
            for side, values in times.wall_s.items():
                rate = flops / statistics.median(values)
                metrics[f"{side}_share_of_matmul"] = (rate / reached, "share")
                if sheet:
                    metrics[f"{side}_share_of_peak"] = (rate / sheet, "share")
                metrics[f"{side}_step_peak_bytes"] = (times.peak_bytes[side], "B")
        return {self.prefix + name: entry for name, entry in metrics.items()}

    def show(self, times: Times) -> None:
        seconds, num_tokens = times.wall_s, self.workload.num_tokens
        report.print_table(
            f"Training step, {self.workload.name}, {self.num_ranks} "
            f"rank{'s' * (self.num_ranks > 1)}",
            {
                "rows": len(self.workload.lengths),
                "tokens": num_tokens,
                "longest": max(self.workload.lengths),
                "minibatches": NUM_MINIBATCHES,
                "micro-batch budget": self.workload.max_tokens,
                "rounds": self.rounds,
                "device": "one thread a rank" if self.device == "cpu" else self.device,
            },
            ["side", "tokens/s", "s a step", "dynamic over it"],
            [
                [side, num_tokens / median, median, ratio(seconds, "dynamic", side)]
                for side, median in ((s, statistics.median(v)) for s, v in seconds.items())
            ],
        )


def cases_of(device: str, *, quick: bool) -> list[Case]:
    if device == "cuda":
        rounds = 3 if quick else 7
        return [Case("gpu_", gpu_workload(quick=quick), 1, rounds, ("dynamic",), "cuda")]
    few, many = (1, 2) if quick else (9, 27)  # steps of the small model are short
    sides = ("dynamic", "fixed", "fixed_lucky", "padded")[: 2 if quick else 4]
    wide, letters, prompts = workloads(quick=quick)
    cases = [
        Case("", wide, 1, few, sides),
        Case("letter_sort_", letters, 1, many, sides),
        Case("two_ranks_", wide, 2, few, sides),
        Case("long_prompts_", prompts, 1, few, ("dynamic", "all_tokens")),
    ]
    return cases[:2] if quick else cases


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    report.add_device(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    metrics: dict[str, tuple[float, str]] = {}
    for case in cases_of(arguments.device, quick=arguments.quick):
        times = case.measure()
        case.show(times)
        metrics |= case.metrics(times)
    if arguments.device == "cuda":
        report.print_metrics("Metrics", {"device": "cuda"}, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
