"""Updates that interrupt running answers, against updates that wait for the longest of them.

    python benchmarks/interruption.py [--quick] [--json FILE] [--engine local sglang]

The same job under `rollout.on_weight_update: interrupt` and under `finish_running`, in turns: real
controllers, one rollout worker, and a train worker that only publishes.

- A step trains on `batch` answers. It lasts as long as generation needs for `--train-share` of a
  batch without updates, measured beforehand, and ends with a publication. The trainer sleeps, so it
  takes no CPU.
- Lengths are lognormal, the same on both sides; no answer ends by itself.

`interrupted_over_waiting` is the ratio of answers a second, median over the rounds, with the
smallest and the largest. Interrupted answers compute their keys and values again, which is
`recomputed` (over the tokens sampled; LocalEngine tells it). `draining` is the share of the time
that waits for running answers. AReaL (arXiv:2505.24298, figure 6) reports ratios of 1.12 and 1.17
for its models of 1.5B and 7B parameters.

With a large batch an update is rare, and with a small one the engine is nearly always draining when
it waits: the ratio depends on the longest answer over the time between two updates.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import qwen2_models
import report
import sglang_side
from random_model_run import Controllers, GivenLengths, model_folder, started

from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    OnWeightUpdate,
    RolloutEngine,
    SGLangConfig,
)

SIDES = (OnWeightUpdate.interrupt, OnWeightUpdate.finish_running)
MAX_PROMPT_TOKENS = 32
NUM_PROMPTS = 4096


@dataclass(frozen=True)
class Workload:
    """What is generated.

    Attributes:
        median_tokens, sigma, max_tokens: of the lognormal lengths.
        slots: decode slots.
    """

    median_tokens: int
    sigma: float
    max_tokens: int
    slots: int

    def prompts(self) -> list[dict[str, Any]]:
        rng = random.Random(0)
        return [
            {
                "input_ids": rng.choices(range(512), k=rng.randrange(4, MAX_PROMPT_TOKENS)),
                "num_new_tokens": self._length(rng),
            }
            for _ in range(NUM_PROMPTS)
        ]

    def _length(self, rng: random.Random) -> int:
        drawn = round(self.median_tokens * rng.lognormvariate(0, self.sigma))
        return max(1, min(self.max_tokens, drawn))


class Side:
    """Training under one choice of `on_weight_update`; it stands still between two calls."""

    def __init__(self, run: Controllers, workload: Workload, batch: int) -> None:
        self._actor, self._rollout = run.actor, run.rollout
        self._prompts, self._workflow = workload.prompts(), GivenLengths()
        self._num_slots, self._batch = workload.slots, batch

    def batch_seconds(self) -> float:
        """To generate a batch when nothing is updated; the first run warms up."""
        num_answers = 8 * self._num_slots
        for _ in range(2):
            began_s = time.perf_counter()
            self._rollout.rollout_batch(self._prompts, self._workflow, num_answers)
            elapsed_s = time.perf_counter() - began_s
        return elapsed_s * self._batch / num_answers

    def train(self, num_steps: int, train_s: float) -> report.Metrics:
        """Steps of `train_s` seconds, each from its batch to the publication."""
        self._rollout.resume()
        (before,), began_s = self._rollout.worker_stats(), time.perf_counter()
        for _ in range(num_steps):
            self._rollout.prepare_batch(self._prompts, self._workflow)
            time.sleep(train_s)
            self._actor.publish_weights(self._rollout)
        elapsed_s, (after,) = time.perf_counter() - began_s, self._rollout.worker_stats()
        self._rollout.wait_for_weights()
        self._rollout.pause()
        grown = {name: value - before.get(name, 0) for name, value in after.items()}
        return {
            "answers_per_s": num_steps * self._batch / elapsed_s,
            "generated_tokens_per_s": grown["generated_tokens"] / elapsed_s,
            "draining_share": grown["update_drain_s"] / elapsed_s,
            "recomputed_share": grown.get("recomputed_tokens", 0) / grown["generated_tokens"],
        }


def compare(
    model: Path,
    engine: RolloutEngine,
    workload: Workload,
    eta: int,
    batch: int,
    arguments: argparse.Namespace,
) -> dict[str, list[report.Metrics]]:
    """Both sides in turns, the first of them changing; the first steps warm up."""
    with ExitStack() as stack:
        sides = {}
        for choice in SIDES:
            run = started(
                ActorConfig(path=str(model), device=Device.cpu, seed=0),
                engine=engine,
                on_weight_update=choice,
                max_running_sequences=workload.slots,
                max_concurrent_groups=workload.slots,
                max_context_tokens=workload.max_tokens + MAX_PROMPT_TOKENS,
                train_batch_groups=batch,
                max_staleness=eta,
                sglang=SGLangConfig(python=str(arguments.sglang_python)),
            )
            sides[choice] = Side(stack.enter_context(run), workload, batch)
        train_s = arguments.train_share * sides[SIDES[0]].batch_seconds()
        measured: dict[str, list[report.Metrics]] = {side: [] for side in SIDES}
        for side in SIDES:
            sides[side].train(2, train_s)
        for number in range(arguments.rounds):
            for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                measured[side].append(sides[side].train(arguments.steps, train_s))
    return measured


def main() -> None:
    parser = report.make_parser(__doc__)
    sglang_side.add_arguments(parser)
    parser.add_argument("--engine", nargs="+", choices=list(RolloutEngine), default=["local"])
    parser.add_argument("--size", choices=tuple(qwen2_models.SHAPES), default="1m")
    parser.add_argument("--etas", nargs="+", type=int, default=[1, 4])
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 128])
    parser.add_argument("--slots", type=int, default=32, help="decode slots")
    parser.add_argument("--median-tokens", type=int, default=32, help="of an answer")
    parser.add_argument("--sigma", type=float, default=0.8, help="of the lengths")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--steps", type=int, default=12, help="of a timed run")
    parser.add_argument("--train-share", type=float, default=0.8)
    parser.add_argument("--rounds", type=int, default=3, help="runs a side")
    arguments = report.parse(
        parser, etas=[1], batches=[8], slots=8, max_tokens=64, steps=3, rounds=1
    )
    if "sglang" in arguments.engine:
        sglang_side.check_python(parser, arguments.sglang_python)
    workload = Workload(
        arguments.median_tokens, arguments.sigma, arguments.max_tokens, arguments.slots
    )
    records: dict[tuple[str, str, str, str], report.Metrics] = {}
    metrics: report.Metrics = {}
    shape = qwen2_models.SHAPES[arguments.size]
    for name, eta, batch in product(arguments.engine, arguments.etas, arguments.batches):
        with model_folder(shape, Dtype.float32) as model:
            found = compare(model, RolloutEngine(name), workload, eta, batch, arguments)
        for side, runs in found.items():
            records[name, f"eta{eta}", f"batch{batch}", side] = {
                value: statistics.median(run[value] for run in runs) for value in runs[0]
            }
        pairs = zip(*(found[side] for side in SIDES), strict=True)
        ratios = [one["answers_per_s"] / other["answers_per_s"] for one, other in pairs]
        case = f"eta{eta}_batch{batch}"
        metrics[f"{name}_interrupted_over_waiting_{case}"] = statistics.median(ratios)
        metrics[f"{name}_interrupted_over_waiting_least_{case}"] = min(ratios)
        metrics[f"{name}_interrupted_over_waiting_most_{case}"] = max(ratios)
    settings = {
        name: getattr(arguments, name)
        for name in ("size", "slots", "median_tokens", "sigma", "max_tokens", "steps", "rounds")
    }
    keys = ("engine", "eta", "batch", "on_weight_update")
    report.print_records("Interrupted against waiting", settings, keys, records)
    report.print_metrics("Ratios of answers a second", settings, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
