"""What `plan` forecasts, against what then happens on virtual time.

    python benchmarks/planner.py [--quick] [--drawn N] [--steps N] [--json FILE]

A run is made at each operating point: a split of the devices, and a bound. From the steps of each,
all others are forecast: `error` is how far a forecast of a step's time is from what was measured,
as a share of it. `regret` is how much longer a step is at the point that is advised than at the
best of all points.

The cluster is that of `scale.py` with 32 devices, whose workers take the time that `scale_costs.py`
says. `--drawn N`: N jobs whose lengths, groups, speeds, splits and bounds are drawn.
"""

from __future__ import annotations

import logging
import random
import statistics
from collections.abc import Sequence
from dataclasses import astuple, replace

import report
from scale import Side, simulate
from scale_costs import Costs

from areal_sc.config.schema import AdmissionMode, GRPOConfig, RolloutConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.planning.advice import OperatingPoint, Plan, forecast, make_plan

COSTS = Costs(devices=32, prompts=64, answers=8, server_answers=64)
SPLITS = ((16, 16), (8, 24), (4, 28))
BOUNDS = (1, 2, 4, 8)


def drawn(seed: int) -> tuple[Costs, list[OperatingPoint]]:
    """A job, and four operating points of it."""
    rng = random.Random(seed)
    costs = replace(
        COSTS,
        devices=16,
        prompts=rng.choice((16, 32, 48)),
        answers=rng.choice((1, 4, 8, 16)),
        median_tokens=rng.choice((500.0, 2000.0, 8000.0)),
        sigma=rng.uniform(0.3, 1.2),
        server_answers=rng.choice((32, 64, 128)),
        turn_s=COSTS.turn_s * rng.uniform(0.5, 2.0),
        turn_s_per_answer=COSTS.turn_s_per_answer * rng.uniform(0.5, 2.0),
        prefill=COSTS.prefill * rng.uniform(0.5, 2.0),
        train=COSTS.train * rng.uniform(0.5, 2.0),
    )
    points = []
    for num_ranks in rng.sample(range(2, 13), 2):
        for bound in rng.sample((1, 2, 3, 4, 6, 8), 2):
            points.append(OperatingPoint(num_ranks, costs.devices - num_ranks, bound))
    return costs, points


def config_of(costs: Costs, point: OperatingPoint) -> GRPOConfig:
    """The settings of a run; its workers have devices of their own."""
    rollout = RolloutConfig(
        max_staleness=point.max_staleness,
        train_batch_groups=costs.prompts,
        group_size=costs.answers,
        max_running_sequences=costs.server_answers,
        max_concurrent_groups=1 << 30,
    )
    config = GRPOConfig(rollout=rollout)
    config.scheduler.type = SchedulerType.slurm.value
    return config


def planned(costs: Costs, point: OperatingPoint, num_steps: int) -> Plan:
    """By the steps of a run at that point."""
    num_devices = point.num_train_workers + point.num_rollout_workers
    costs = replace(
        costs, devices=num_devices, generating_share=point.num_rollout_workers / num_devices
    )
    side = Side(point.max_staleness, AdmissionMode.just_in_time)
    plan = make_plan(simulate(costs, side, num_steps), config_of(costs, point))
    assert plan is not None, "its steps tell too little"
    return plan


def compare(costs: Costs, points: Sequence[OperatingPoint], num_steps: int) -> report.Records:
    """What is forecast from each point for all others, and how good the advised ones are."""
    plans = {point: planned(costs, point, num_steps) for point in points}
    advised = {plan.advised.point for plan in plans.values()}
    for point in sorted(advised - plans.keys(), key=astuple):
        plans[point] = planned(costs, point, num_steps)
    step_s = {point: plan.times.step_s for point, plan in plans.items()}
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for point in points:
        plan, settings = plans[point], config_of(costs, point).rollout
        errors = [
            abs(forecast(plan.times, settings, other).step_s / step_s[other] - 1)
            for other in plans
            if other != point
        ]
        to = plan.advised.point
        records[astuple(point)] = {
            "s_per_step": step_s[point],
            "error_median": statistics.median(errors or [0.0]),
            "error_max": max(errors, default=0.0),
            "to_train": to.num_train_workers,
            "to_rollout": to.num_rollout_workers,
            "to_bound": to.max_staleness,
            "regret": step_s[to] / min(step_s.values()) - 1,
        }
    return records


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--drawn", type=int, default=0, help="so many jobs that are drawn")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    splits, bounds, num_steps, costs = SPLITS, BOUNDS, arguments.steps, COSTS
    if arguments.quick:
        splits, bounds, num_steps = splits[:2], bounds[1:2], 24
        costs = replace(COSTS, prompts=8)
    jobs = [(costs, [OperatingPoint(*split, bound) for split in splits for bound in bounds])]
    if arguments.drawn:
        jobs = [drawn(seed) for seed in range(arguments.drawn)]
    metrics: report.Metrics = {}
    for number, (costs, points) in enumerate(jobs):
        records = compare(costs, points, num_steps)
        title = "Forecasts" if len(jobs) == 1 else f"Forecasts of job {number}"
        report.print_records(title, {"steps": num_steps}, ("train", "rollout", "bound"), records)
        prefix = "" if len(jobs) == 1 else f"job{number}_"
        metrics |= {prefix + name: value for name, value in report.flat(records).items()}
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
