"""The training step against a hand-written torch loop, and against other ways of micro-batching.

    python benchmarks/train_throughput.py [--quick] [--json FILE]

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
import torch.nn.functional as F
from train_through_controller import controller_side
from train_workload import (
    NUM_MINIBATCHES,
    Workload,
    make_rows,
    minibatches_of_rank,
    save_model,
    workloads,
)
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.algorithms.packing import pack_micro_batches
from areal_sc.config.schema import ActorConfig, Device, OptimizerConfig, PPOConfig
from areal_sc.engines.fsdp.engine import FSDPEngine
from areal_sc.transport.packed_rows import PackedRows

Step = Callable[[], None]


def actor_config(workload: Workload, folder: Path) -> ActorConfig:
    return ActorConfig(
        path=str(folder),
        device=Device.cpu,
        max_tokens_per_micro_batch=workload.max_tokens,
        seed=0,
        optimizer=OptimizerConfig(lr=1e-5, total_steps=100),
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


def attention_of_rows(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    row_lengths: Sequence[int] = (),
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """What one writes by hand: causal attention, one row after the other."""
    parts = zip(
        *(tensor.split(list(row_lengths), 2) for tensor in (query, key, value)), strict=True
    )
    outputs = [
        F.scaled_dot_product_attention(*row, is_causal=True, enable_gqa=True) for row in parts
    ]
    return torch.cat(outputs, 2).transpose(1, 2), None


def handwritten_step(workload: Workload, folder: Path) -> Step:
    """The same step without areal_sc's engine; only the choice of micro-batches is shared."""
    rows = make_rows(workload)
    AttentionInterface.register("benchmark_rows", attention_of_rows)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="benchmark_rows"
    ).eval()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-5, betas=(0.9, 0.999), weight_decay=0.0, fused=True
    )

    def logprobs_and_entropy(
        part: PackedRows, asked: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        position_ids = torch.cat([torch.arange(length) for length in part.lengths])
        tokens = part.fields["input_ids"].long()
        hidden = model.model(
            input_ids=tokens[None],
            position_ids=position_ids[None],
            use_cache=False,
            row_lengths=part.lengths,
        ).last_hidden_state[0]
        logits = model.lm_head(hidden[asked - 1])
        distribution = logits.log_softmax(-1)
        with torch.no_grad():
            entropy = -(distribution.exp() * distribution).sum(-1)
        return distribution.gather(1, tokens[asked, None])[:, 0], entropy

    def step() -> None:
        proximal = torch.zeros(rows.num_tokens)
        starts = torch.tensor(rows.starts)
        with torch.no_grad():
            for chosen in pack_micro_batches(rows.lengths, workload.max_tokens):
                part = rows.take(chosen)
                asked = part.fields["loss_mask"].nonzero()[:, 0]
                places = torch.cat(
                    [starts[row] + torch.arange(rows.lengths[row]) for row in chosen]
                )
                proximal[places[asked]] = logprobs_and_entropy(part, asked)[0]
        known = replace(rows, fields={**rows.fields, "proximal_logprobs": proximal})
        for minibatch in minibatches_of_rank(rows, 0, 1):
            num_tokens = int(known.take(minibatch).fields["loss_mask"].sum())
            lengths = [rows.lengths[row] for row in minibatch]
            entropy_sum = torch.zeros(())
            for positions in pack_micro_batches(lengths, workload.max_tokens):
                part = known.take([minibatch[position] for position in positions])
                asked = part.fields["loss_mask"].nonzero()[:, 0]
                logprobs, entropy = logprobs_and_entropy(part, asked)
                entropy_sum += entropy.sum()
                fields = {name: values[asked] for name, values in part.fields.items()}
                advantages = torch.repeat_interleave(
                    torch.tensor(part.advantages), torch.tensor(part.lengths)
                )[asked]
                ratio = (logprobs - fields["proximal_logprobs"]).exp()
                weight = (fields["proximal_logprobs"] - fields["behavior_logprobs"]).exp()
                gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
                (-(weight * gain)[weight <= 5].sum() / num_tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


@dataclass(frozen=True)
class Times:
    """Seconds of every side in every round."""

    wall_s: dict[str, list[float]]
    cpu_s: dict[str, list[float]]


def measure(
    steps: dict[str, Step],
    rounds: int,
    *,
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
    times = Times({name: [] for name in steps}, {name: [] for name in steps})
    for number in range(rounds + 1):
        for name, step in steps.items():
            cpu_before, before = cpu_clock(), time.perf_counter()
            step()
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


def measure_one_rank(workload: Workload, folder: Path, sides: Sequence[str], rounds: int) -> Times:
    config = actor_config(workload, folder)
    rows = make_rows(workload)
    in_minibatch_order = [row for part in minibatches_of_rank(rows, 0, 1) for row in part]
    with controller_side(config, rows.take(in_minibatch_order), folder / "run") as controller:
        steps = {"controller": controller.step, "handwritten": handwritten_step(workload, folder)}
        for side in sides:
            steps[side] = engine_step(ENGINES[side](config), workload)
        return measure(steps, rounds, after_round=controller.publish, cpu_clock=controller.cpu_s)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    report.add_arguments(parser)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hf_logging.disable_progress_bar()
    few, many = (1, 2) if arguments.quick else (9, 27)  # steps of the small model are short
    sides = ("dynamic", "fixed", "fixed_lucky", "padded")[: 2 if arguments.quick else 4]
    wide, letters, prompts = workloads(quick=arguments.quick)
    metrics: dict[str, tuple[float, str]] = {}
    cases = [
        ("", wide, 1, few, sides),
        ("letter_sort_", letters, 1, many, sides),
        ("two_ranks_", wide, 2, few, sides),
        ("long_prompts_", prompts, 1, few, ("dynamic", "all_tokens")),
    ]
    for prefix, workload, num_ranks, rounds, sides in cases[: 2 if arguments.quick else 4]:
        with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as name:
            save_model(workload, Path(name))
            measure_ranks = measure_one_rank if num_ranks == 1 else measure_two_ranks
            times = measure_ranks(workload, Path(name), sides, rounds)
        seconds = times.wall_s
        if num_ranks == 1:
            for name, ours, clock in (
                ("step_vs_handwritten", "controller", times.wall_s),
                ("step_vs_handwritten_cpu", "controller", times.cpu_s),
                ("engine_step_vs_handwritten", "dynamic", times.wall_s),
            ):
                metrics[prefix + name] = (ratio(clock, ours, "handwritten"), "x")
        for side in sides[1:]:
            metrics[f"{prefix}dynamic_over_{side}"] = (ratio(seconds, "dynamic", side), "x")
        speed = {side: workload.num_tokens / statistics.median(s) for side, s in seconds.items()}
        metrics[f"{prefix}tokens_per_s"] = (speed["dynamic"], "tokens/s")
        report.print_table(
            f"Training step, {workload.name}, {num_ranks} rank{'s' * (num_ranks > 1)}",
            {
                "rows": len(workload.lengths),
                "tokens": workload.num_tokens,
                "longest": max(workload.lengths),
                "minibatches": NUM_MINIBATCHES,
                "micro-batch budget": workload.max_tokens,
                "rounds": rounds,
                "threads a rank": 1,
            },
            ["side", "tokens/s", "s a step", "dynamic over it"],
            [
                [side, speed[side], statistics.median(s), ratio(seconds, "dynamic", side)]
                for side, s in seconds.items()
            ],
        )
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
