"""What the planner forecasts, against what then happens: on virtual time, and on this machine.

    python benchmarks/planner.py [--quick] [--real] [--steps N] [--json FILE]

A run is made at each operating point: a split of the devices, and a bound. From the steps of each,
the planner forecasts all others: `error` is how far a forecast of a step's time is from what was
measured, as a share of it. `regret` is how much longer a step is at the point that the planner
advises than at the best of all points.

Virtual time: the cluster of `scale.py` with 32 devices, whose workers take the time that
`scale_costs.py` says. That knows more than the planner: new weights stop servers, and the caches of
running answers are computed anew. `--real`: the letter-sorting example as shipped, on this machine,
where workers share the cores.
"""

from __future__ import annotations

import logging
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import report
from scale import Side, simulate
from scale_costs import Costs

from areal_sc.commands.plan import config_of
from areal_sc.config.schema import AdmissionMode, GRPOConfig, RolloutConfig
from areal_sc.run_folder import RunFolder
from areal_sc.trainer.metrics import StepMetrics
from areal_sc.trainer.metrics_log import History
from areal_sc.trainer.planning.advice import make_plan, shared_cores
from areal_sc.trainer.planning.figures import Figures, OperatingPoint, newest_figures
from areal_sc.trainer.planning.forecast import Forecaster

ROOT = Path(__file__).resolve().parents[1]

COSTS = Costs(devices=32, prompts=64, answers=8, server_answers=64)
SPLITS = ((16, 16), (8, 24), (4, 28))
BOUNDS = (1, 2, 4, 8)
REAL_SPLITS = ((1, 1), (1, 2), (2, 1))
REAL_BOUNDS = (0, 1, 2, 4)


@dataclass(frozen=True)
class Measured:
    """One run at one operating point; `steps` are those of the whole run."""

    config: GRPOConfig
    steps: Sequence[StepMetrics]


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


def real(folder: Path, point: OperatingPoint, num_steps: int) -> Measured:
    """A run of the example on this machine."""
    name = f"{point.num_train_workers}-{point.num_rollout_workers}-{point.max_staleness}"
    settings = {
        "run_dir": folder / name,
        "actor.path": folder / "warm_start",
        "actor.parallel.data": point.num_train_workers,
        "rollout.num_workers": point.num_rollout_workers,
        "rollout.max_staleness": point.max_staleness,
        "evaluation.num_prompts": 8,
        "total_steps": num_steps,
    }
    program, config = ROOT / "examples/letter_sort.py", ROOT / "configs/letter_sort.yaml"
    changes = [f"{name}={value}" for name, value in settings.items()]
    with (folder / f"{name}.txt").open("w") as output:
        command = [sys.executable, program, "--config", config, *changes]
        subprocess.run(command, check=True, stdout=output, stderr=output)
    found = RunFolder(folder / name)
    return Measured(config_of(found), History.read(found.metrics_path).steps)


def compare(
    run: Callable[[OperatingPoint], Measured], points: Iterable[OperatingPoint], *, is_real: bool
) -> report.Records:
    """What is forecast from each point for all others, and how good the advised ones are."""
    runs: dict[OperatingPoint, Measured] = {}
    figures: dict[OperatingPoint, Figures] = {}

    def measure(point: OperatingPoint) -> None:
        runs[point] = run(point)
        found = newest_figures(runs[point].steps, runs[point].config)
        assert found is not None, f"{point}: its steps tell too little"
        figures[point] = found

    for point in points:
        measure(point)
    num_cores = shared_cores(runs[point].config) if is_real else None
    plans = {}
    for point in list(runs):
        plan = plans[point] = make_plan(runs[point].steps, runs[point].config, num_cores=num_cores)
        assert plan is not None
        if plan.advised.point not in runs:
            measure(plan.advised.point)
    best_s = min(of_point.step_s for of_point in figures.values())
    records: dict[tuple[str | int, ...], report.Metrics] = {}
    for point, plan in plans.items():
        forecaster = Forecaster(figures[point], runs[point].config, num_cores)
        errors = [
            abs(forecaster.at(other).step_s / figures[other].step_s - 1)
            for other in figures
            if other != point
        ]
        to = plan.advised.point
        records[point.num_train_workers, point.num_rollout_workers, point.max_staleness] = {
            "s_per_step": figures[point].step_s,
            "simulation_error": plan.error,
            "error_median": statistics.median(errors),
            "error_max": max(errors),
            "to_train": to.num_train_workers,
            "to_rollout": to.num_rollout_workers,
            "to_bound": to.max_staleness,
            "regret": figures[to].step_s / best_s - 1,
        }
    return records


def main() -> None:
    parser = report.make_parser(__doc__)
    parser.add_argument("--real", action="store_true", help="the example on this machine")
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    splits, bounds = (REAL_SPLITS, REAL_BOUNDS) if arguments.real else (SPLITS, BOUNDS)
    num_steps, costs = arguments.steps, COSTS
    if arguments.quick:
        splits, bounds, num_steps = splits[:2], bounds[1:2], 24
        costs = replace(COSTS, prompts=8)
    points = [OperatingPoint(*split, bound) for split in splits for bound in bounds]
    with tempfile.TemporaryDirectory(prefix="areal-sc-benchmark-") as folder:

        def run(point: OperatingPoint) -> Measured:
            if arguments.real:
                return real(Path(folder), point, num_steps)
            return simulated(costs, point, num_steps)

        records = compare(run, points, is_real=arguments.real)
    report.print_records("Forecasts", {"steps": num_steps}, ("train", "rollout", "bound"), records)
    report.write(report.flat(records), arguments.json)


if __name__ == "__main__":
    main()
