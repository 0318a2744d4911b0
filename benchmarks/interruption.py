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
from itertools import product
from pathlib import Path
from typing import Any

import qwen2_models
import report
import sglang_side
from random_model_run import Controllers, GivenLengths, model_folder, started

from areal_sc.config.schema import ActorConfig, Device, Dtype, OnWeightUpdate, RolloutEngine
from areal_sc.config.server_settings import SGLangConfig

SIDES = (OnWeightUpdate.interrupt, OnWeightUpdate.finish_running)
MAX_PROMPT_TOKENS = 32
NUM_PROMPTS = 4096


def prompts_of(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What is generated: random prompts, and answers of lognormal lengths."""
    rng = random.Random(0)
    prompts = []
    for _ in range(NUM_PROMPTS):
        length = round(arguments.median_tokens * rng.lognormvariate(0, arguments.sigma))
        prompts.append(
            {
                "input_ids": rng.choices(range(512), k=rng.randrange(4, MAX_PROMPT_TOKENS)),
                "num_new_tokens": max(1, min(arguments.max_tokens, length)),
            }
        )
    return prompts


class Side:
    """Training under one choice of `on_weight_update`; it stands still between two calls."""

    def __init__(self, run: Controllers, prompts: list[dict[str, Any]], batch: int) -> None:
        self._actor, self._rollout = run.actor, run.rollout
        self._prompts, self._workflow = prompts, GivenLengths()
        self._batch = batch

    def batch_seconds(self) -> float:
        """To generate a batch when nothing is updated; the first run warms up."""
        num_answers = 8 * self._rollout.config.max_running_sequences
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
                max_running_sequences=arguments.slots,
                max_concurrent_groups=arguments.slots,
                max_context_tokens=arguments.max_tokens + MAX_PROMPT_TOKENS,
                train_batch_groups=batch,
                max_staleness=eta,
                sglang=SGLangConfig(python=str(arguments.sglang_python)),
            )
            sides[choice] = Side(stack.enter_context(run), prompts_of(arguments), batch)
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
    records: dict[tuple[str, str, str, str], report.Metrics] = {}
    metrics: report.Metrics = {}
    shape = qwen2_models.SHAPES[arguments.size]
    for name, eta, batch in product(arguments.engine, arguments.etas, arguments.batches):
        with model_folder(shape, Dtype.float32) as model:
            found = compare(model, RolloutEngine(name), eta, batch, arguments)
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
