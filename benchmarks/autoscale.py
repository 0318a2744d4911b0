"""Autoscaling against the best fixed number of rollout workers, and the books of a run that scales.

    python benchmarks/autoscale.py [--quick] [--json FILE]

Speed is simulated: the real controllers run on virtual time, and workers take the time that
`scale_costs.py` says, one server each. Runs with fixed numbers of workers come first. The best of
them is the smallest whose steps take at most 1.05 times as long as the shortest. Runs that begin
with one less, and with three more, find their number themselves; what they are at the end is the
mean of their last third, `per_worker` is steps a second and worker.

The books are those of real processes: a small model with random weights is trained, while the
number of its rollout workers changes at random. Rows are counted by the run's own account; the
oldest group that is trained must be within the bound (`over_bound: wait`).
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
from argparse import Namespace
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import qwen2_models
import random_model_run
import report
from costed_cluster import costed_run
from scale_costs import Costs
from simulation.tasks import NamedWorkflow, NumberedPrompts
from simulation.virtual_loop import run_virtual

from areal_sc.config.parallel_settings import AutoscaleConfig
from areal_sc.config.ppo_settings import NormScope, PPOConfig
from areal_sc.config.schema import ActorConfig, Device, Dtype, OverBound, WeightUpdateConfig

MAX_WORKERS = 14
MAX_SLOWER = 1.05
"""Steps of the best fixed number may take so much longer than the shortest."""
COSTS = Costs(prompts=32, answers=8, median_tokens=2000.0, max_tokens=8192, server_answers=64)
TRAINING_DEVICES = 4
MAX_STALENESS = 4


@dataclass(frozen=True)
class Step:
    """Attributes: took_s: virtual seconds; num_workers: when it ended."""

    took_s: float
    num_workers: int


async def run(num_workers: int, num_steps: int, autoscale: AutoscaleConfig) -> list[Step]:
    """All steps of one simulated run."""
    work = costed_run(
        COSTS,
        1,
        TRAINING_DEVICES,
        num_nodes=MAX_WORKERS,
        num_steps=num_steps,
        max_staleness=MAX_STALENESS,
        num_rollout_workers=num_workers,
        autoscale=autoscale,
    )
    prompts, workflow, steps = NumberedPrompts(1 << 20), NamedWorkflow(), list[Step]()
    async with work as (actor, rollout, cluster):
        for _ in range(num_steps):
            began_s = cluster.now_s
            batch = await rollout.prepare_batch_async(prompts, workflow)
            await actor.ppo_update_async(actor.compute_advantages(batch))
            await actor.publish_weights_async(rollout)
            for book in (cluster.starts, cluster.trained, cluster.sealed_rows):
                book.clear()
            alive = sum(worker.exit_status is None for worker in cluster.rollout_workers)
            steps.append(Step(cluster.now_s - began_s, alive))
    return steps


def measure(num_workers: int, num_steps: int, autoscale: AutoscaleConfig) -> report.Metrics:
    """Means over the last third; workers that leave count until they are gone."""
    steps = run_virtual(
        run(num_workers, num_steps, autoscale), max_virtual_s=1e9, max_turns=1 << 40
    )
    last = steps[-(num_steps // 3) :]
    s_per_step = statistics.mean(step.took_s for step in last)
    workers = statistics.mean(step.num_workers for step in last)
    numbers = [step.num_workers for step in steps]
    return {
        "s_per_step": s_per_step,
        "workers": workers,
        "per_worker_per_s": 1 / (s_per_step * workers),
        "changes": sum(a != b for a, b in pairwise(numbers)),
    }


def compare(size: Namespace) -> report.Metrics:
    """Runs that find their number, over the best fixed one."""
    off = AutoscaleConfig()
    fixed = {n: measure(n, size.fixed_steps, off) for n in range(*size.fixed)}
    shortest_s = min(record["s_per_step"] for record in fixed.values())
    best = min(n for n, r in fixed.items() if r["s_per_step"] <= MAX_SLOWER * shortest_s)
    records = {("fixed", n): record for n, record in fixed.items()}
    for first in (best - 1, best + 3):
        records["found", first] = measure(first, size.steps, AutoscaleConfig(1, MAX_WORKERS))
    report.print_records("Autoscaling", asdict(COSTS), ("number", "first"), records)
    metrics: report.Metrics = {"best_fixed_workers": best}
    for name, first in (("one_less", best - 1), ("three_more", best + 3)):
        found, against = records["found", first], fixed[best]
        metrics[f"{name}_workers"] = found["workers"]
        metrics[f"{name}_changes"] = found["changes"]
        for key, said in (("per_worker_per_s", "per_worker"), ("s_per_step", "step")):
            metrics[f"{name}_over_best_{said}"] = found[key] / against[key]
    return metrics


def keep_books(size: Namespace) -> report.Metrics:
    """A run of real processes, whose number of workers changes at random, step by step."""
    rng, eta = random.Random(0), 2
    prompts = [
        {"input_ids": [rng.randrange(qwen2_models.NUM_WORDS) for _ in range(8)]} for _ in range(256)
    ]
    prompts = [prompt | {"num_new_tokens": rng.randint(4, 48)} for prompt in prompts]
    with random_model_run.model_folder(qwen2_models.SHAPES["1m"], Dtype.float32) as folder:
        actor_config = ActorConfig(
            path=str(folder),
            device=Device.cpu,
            ppo=PPOConfig(num_minibatches=1, advantage="none", advantage_std=NormScope.none),
            weight_update=WeightUpdateConfig(),
        )
        num_groups, num_changes, oldest = 8, 0, 0
        with random_model_run.started(
            actor_config,
            train_batch_groups=num_groups,
            max_staleness=eta,
            over_bound=OverBound.wait,
            max_context_tokens=64,
        ) as run:
            workflow, num_workers, num_steps = random_model_run.GivenLengths(), 1, 0
            while num_changes < size.changes or num_steps % 4:
                if num_steps % 2 == 0 and num_changes < size.changes:
                    num_workers = rng.choice([n for n in (1, 2, 3) if n != num_workers])
                    run.rollout.scale(num_workers)
                    num_changes += 1
                batch = run.rollout.prepare_batch(prompts, workflow)
                oldest = max(
                    oldest, *(batch.global_step - row.admitted_version for row in batch.rows)
                )
                run.actor.ppo_update(run.actor.compute_advantages(batch))
                run.actor.publish_weights(run.rollout)
                num_steps += 1
            account = run.rollout.account()
    open_groups = account["queued"] + account["running"] + account["finished"]
    missing = account["admitted"] - account["consumed"] - open_groups
    return {
        "real_changes": num_changes,
        "real_steps": num_steps,
        "rows_lost": num_steps * num_groups - account["rows_trained"],
        "rows_trained_twice": account["rows_trained_twice"],
        "groups_missing": missing,
        "groups_rejected": sum(account["rejected"].values()),
        "staleness_over_bound": max(0, oldest - eta),
    }


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--fixed", type=int, nargs=2, default=(4, 9), help="from, and below")
    parser.add_argument("--fixed-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=240, help="of runs that find their number")
    parser.add_argument("--changes", type=int, default=20, help="of the real run")
    arguments = report.parse(parser, fixed=(6, 8), fixed_steps=12, steps=24, changes=3)
    logging.disable(logging.WARNING)
    metrics = compare(arguments) | keep_books(arguments)
    report.print_metrics("Against the best, and the books", {}, metrics)
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
