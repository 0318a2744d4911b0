"""What the planner forecasts, against what then happens: on virtual time, and on this machine.

    python benchmarks/planner.py [--quick] [--real | --drawn N] [--seeds N] [--steps N]
        [--json FILE]

A run is made at each operating point: a split of the devices, and a bound. From the steps of each,
the planner forecasts all others: `error` is how far a forecast of a step's time is from what was
measured, as a share of it. `regret` is how much longer a step is at the point that the planner
advises than at the best of all points. With several seeds, these are of medians over the seeds, of
what was measured and of what was forecast; `error_run` is the worst forecast of a single run, and
`regret` the worst one of what any of the runs advises.

Virtual time: the cluster of `scale.py` with 32 devices, whose workers take the time that
`scale_costs.py` says. That knows more than the planner: new weights stop servers, and the caches of
running answers are computed anew. `--drawn N`: N jobs whose lengths, groups, speeds, splits and
bounds are drawn. `--real`: the letter-sorting example as shipped, on this machine, where workers
share the cores: there, no other number of ranks is forecast, but a smaller one may be named, and
that is followed.
"""

from __future__ import annotations

import logging
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path

import report
from scale import Side, simulate
from scale_costs import Costs

from areal_sc.commands.plan import config_of
from areal_sc.config.schema import AdmissionMode, GRPOConfig, RolloutConfig
from areal_sc.planning.advice import Plan, make_plan
from areal_sc.planning.cores import SharedCores, shared_cores
from areal_sc.planning.figures import Figures, OperatingPoint, newest_figures
from areal_sc.planning.forecast import Forecaster
from areal_sc.records.metrics import StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]

COSTS = Costs(devices=32, prompts=64, answers=8, server_answers=64)
SPLITS = ((16, 16), (8, 24), (4, 28))
BOUNDS = (1, 2, 4, 8)
REAL_POINTS = (
    OperatingPoint(1, 1, 4),  # as shipped
    OperatingPoint(1, 1, 0),
    OperatingPoint(1, 1, 1),
    OperatingPoint(1, 1, 2),
    OperatingPoint(1, 2, 4),
    OperatingPoint(1, 2, 2),
    OperatingPoint(2, 1, 4),
)


@dataclass(frozen=True)
class Measured:
    """One run at one operating point; `steps` are those of the whole run."""

    config: GRPOConfig
    steps: Sequence[StepMetrics]

    @property
    def figures(self) -> Figures:
        found = newest_figures(self.steps, self.config)
        assert found is not None, "its steps tell too little"
        return found


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


def simulated(costs: Costs, point: OperatingPoint, num_steps: int) -> Measured:
    """A run of the simulated cluster."""
    num_devices = point.num_train_workers + point.num_rollout_workers
    costs = replace(
        costs, devices=num_devices, generating_share=point.num_rollout_workers / num_devices
    )
    rollout = RolloutConfig(
        max_staleness=point.max_staleness,
        train_batch_groups=costs.prompts,
        group_size=costs.answers,
        max_running_sequences=costs.server_answers,
        max_concurrent_groups=1 << 30,
    )
    side = Side(point.max_staleness, AdmissionMode.just_in_time)
    return Measured(GRPOConfig(rollout=rollout), simulate(costs, side, num_steps))


def real(folder: Path, point: OperatingPoint, num_steps: int, seed: int) -> Measured:
    """A run of the example on this machine."""
    name = f"{point.num_train_workers}-{point.num_rollout_workers}-{point.max_staleness}-{seed}"
    settings = {
        "run_dir": folder / name,
        "actor.path": folder / "warm_start",
        "actor.parallel.data": point.num_train_workers,
        "rollout.num_workers": point.num_rollout_workers,
        "rollout.max_staleness": point.max_staleness,
        "evaluation.num_prompts": 8,
        "total_steps": num_steps,
        "seed": seed,
    }
    program, config = ROOT / "examples/letter_sort.py", ROOT / "configs/letter_sort.yaml"
    changes = [f"{name}={value}" for name, value in settings.items()]
    with (folder / f"{name}.txt").open("w") as output:
        command = [sys.executable, program, "--config", config, *changes]
        subprocess.run(command, check=True, stdout=output, stderr=output)
    found = RunFolder(folder / name)
    return Measured(config_of(found), History.read(found.metrics_path).steps)


def compare(
    run: Callable[[OperatingPoint, int], Measured],
    points: Iterable[OperatingPoint],
    num_seeds: int,
    *,
    is_real: bool,
) -> report.Records:
    """What is forecast from each point for all others, and how good the advised ones are."""
    points, seeds = list(points), range(num_seeds)
    runs = {point: list[Measured]() for point in points}
    for seed in seeds:
        for point in points:
            runs[point].append(run(point, seed))
    cores = shared_cores(runs[points[0]][0].config) if is_real else None
    plans = {point: [_plan(measured, cores) for measured in runs[point]] for point in points}
    advised = {advised_by(plan) for of_point in plans.values() for plan in of_point}
    for point in sorted(advised, key=astuple):
        if point not in runs:
            runs[point] = [run(point, seed) for seed in seeds]
    step_s = {
        point: statistics.median(measured.figures.step_s for measured in of_point)
        for point, of_point in runs.items()
    }
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for point, of_point in plans.items():
        others = [
            other
            for other in runs
            if other != point
            and (cores is None or other.num_train_workers == point.num_train_workers)
        ]
        forecasters = [Forecaster(it.figures, it.config, cores) for it in runs[point]]
        forecasts = {
            other: [forecaster.at(other).step_s for forecaster in forecasters] for other in others
        }
        errors = [
            abs(statistics.median(found) / step_s[other] - 1) for other, found in forecasts.items()
        ]
        of_runs = [abs(s / step_s[other] - 1) for other in others for s in forecasts[other]]
        to = max((advised_by(plan) for plan in of_point), key=lambda it: step_s[it])
        records[astuple(point)] = {
            "s_per_step": step_s[point],
            "simulation_error": statistics.median(plan.error for plan in of_point),
            "error_median": statistics.median(errors or [0.0]),
            "error_max": max(errors, default=0.0),
            "error_run": max(of_runs, default=0.0),
            "to_train": to.num_train_workers,
            "to_rollout": to.num_rollout_workers,
            "to_bound": to.max_staleness,
            "regret": step_s[to] / min(step_s.values()) - 1,
        }
    return records


def _plan(measured: Measured, cores: SharedCores | None) -> Plan:
    plan = make_plan(measured.steps, measured.config, cores=cores)
    assert plan is not None
    return plan


def advised_by(plan: Plan) -> OperatingPoint:
    """Where a user goes who follows all that is said."""
    point = plan.advised.point
    if plan.fewer_data is None:
        return point
    return replace(point, num_train_workers=plan.fewer_data * plan.ranks_per_data)


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="the example on this machine")
    parser.add_argument("--drawn", type=int, default=0, help="so many jobs that are drawn")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--seeds", type=int, default=1, help="with --real: so many runs a point")
    arguments = parser.parse_args()
    if arguments.seeds != 1 and not arguments.real:
        parser.error("only --real has seeds: simulated time is the same each time")
    logging.disable(logging.WARNING)
    splits, bounds, num_steps, costs = SPLITS, BOUNDS, arguments.steps, COSTS
    if arguments.quick:
        splits, bounds, num_steps = splits[:2], bounds[1:2], 24
        costs = replace(COSTS, prompts=8)
    jobs = [(costs, [OperatingPoint(*split, bound) for split in splits for bound in bounds])]
    if arguments.real:
        jobs = [(costs, list(REAL_POINTS))]
    elif arguments.drawn:
        jobs = [drawn(seed) for seed in range(arguments.drawn)]
    metrics: report.Metrics = {}
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:
        for number, (costs, points) in enumerate(jobs):

            def run(point: OperatingPoint, seed: int, costs: Costs = costs) -> Measured:
                if arguments.real:
                    return real(Path(folder), point, num_steps, seed)
                return simulated(costs, point, num_steps)

            records = compare(run, points, arguments.seeds, is_real=arguments.real)
            title = "Forecasts" if len(jobs) == 1 else f"Forecasts of job {number}"
            report.print_records(
                title, {"steps": num_steps}, ("train", "rollout", "bound"), records
            )
            prefix = "" if len(jobs) == 1 else f"job{number}_"
            metrics |= {prefix + name: value for name, value in report.flat(records).items()}
    report.write(metrics, arguments.json)


if __name__ == "__main__":
    main()
