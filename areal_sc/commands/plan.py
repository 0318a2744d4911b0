"""`plan RUN_DIR`: the operating point that a run should have, by what its steps have measured."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Final

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_sc.commands.arguments import add_run_dir, number, run_folder
from areal_sc.config.loading.loader import compose_config
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import CommandError, RunFolderError
from areal_sc.planning.advice import Plan, make_plan
from areal_sc.planning.cores import shared_cores
from areal_sc.planning.figures import MIN_STEPS
from areal_sc.planning.simulated_run import Forecast
from areal_sc.quantities import short_duration
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.json_lines import to_json

MAX_OTHERS: Final = 6
"""Points that are shown beside the present one and the advised one."""
MIN_FREE_SHARE: Final = 0.85
"""Share of the cores' time that is to be free; with less, the user is told that others use them."""

COMMAND: Final = dict(
    help="say how many workers should train and generate, and how stale data need be",
    description="Says which split of a run's devices between training and generation, and "
    "which rollout.max_staleness, would give the shortest step with the freshest data: by a "
    "simulation of the run with what its newest steps have measured. The run may go on "
    "meanwhile. Where the run has had other settings before, it is shown how far out a "
    "forecast from then is.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument(
        "--devices",
        type=number("a number of at least 2, as one trains and one generates", 2),
        metavar="N",
        help="devices for training and generation together; default: as many as now. On CPUs each "
        "worker is one",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: it is not the folder of a run, or its steps tell too little."""
    folder = run_folder(arguments)
    config = config_of(folder)
    steps = History.read(folder.metrics_path).steps if folder.metrics_path.exists() else []
    cores = shared_cores(config)
    plan = make_plan(steps, config, arguments.devices, cores=cores)
    if plan is None:
        raise CommandError(
            f"the steps of {folder.path} tell too little: a plan needs about "
            f"{2 * (1 + config.rollout.max_staleness) + MIN_STEPS} steps with the present split "
            f"and bound (there are {len(steps)} steps in all), in which workers have counted "
            "what they generate"
        )
    if arguments.json:
        sys.stdout.write(to_json(_record(plan)).decode() + "\n")
        return
    console = Console()
    _show(console, plan)
    if cores is not None and cores.free_share < MIN_FREE_SHARE:
        console.print(
            f"processes take {1 - cores.free_share:.0%} of the cores now; if these are not the "
            "run's own, forecasts of other numbers of workers are better when they have ended"
        )


def config_of(folder: RunFolder) -> GRPOConfig:
    """The settings of a run, without those of its script.

    Raises: RunFolderError: they cannot be read. ConfigError: they are of another areal_sc.
    """
    try:
        content = yaml.safe_load(folder.config_path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise RunFolderError(f"{folder.config_path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder.config_path} is not a mapping")
    known = {item.name for item in fields(GRPOConfig)}
    own = {name: value for name, value in content.items() if name in known}
    return compose_config(None, (), GRPOConfig, own)


def _show(console: Console, plan: Plan) -> None:
    present, advised, figures = plan.present, plan.advised, plan.figures
    steps = f"steps {figures.first_step} to {figures.last_step}"
    if advised is present:
        head = f"stay: nothing that was tried is shorter and as fresh ({steps})"
    else:
        head = f"set {plan.settings} ({steps})"
    console.print(Text(head, style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("train", "rollout", "bound", "step", "waits", "staleness"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = [("now", present)]
    if advised is not present:
        rows.append(("advised", advised))
    rows += [("", other) for other in _others(plan)]
    for name, forecast in rows:
        point = forecast.point
        table.add_row(
            name,
            f"{point.num_train_workers}",
            f"{point.num_rollout_workers}",
            f"{point.max_staleness}",
            short_duration(forecast.step_s),
            f"{forecast.wait_s / forecast.step_s:.0%}",
            f"{forecast.staleness:.1f}",
        )
    console.print(table)
    busy = (
        f"generation is busy {figures.busy_share:.0%} of the time with {figures.num_running:.0f} "
        "answers at a time"
    )
    group = f"a group takes {short_duration(figures.group_s)}"
    console.print(f"{busy}, {group}; simulated steps are corrected by {plan.error:+.0%}")
    if len({forecast.point.num_train_workers for forecast in plan.tried}) > 1:
        training = figures.training
        console.print(
            f"{short_duration(training.fixed_s)} of a step's training do not get shorter with "
            f"more ranks (give or take {short_duration(training.std_s)})"
        )
    for earlier in plan.earlier:
        source, error = earlier.source, earlier.error
        point = source.point
        console.print(
            f"earlier forecast, from steps {source.first_step} to {source.last_step} "
            f"({point.num_train_workers} + {point.num_rollout_workers} workers, bound "
            f"{point.max_staleness}): {short_duration(earlier.forecast.step_s)}, "
            f"{abs(error):.0%} too {'long' if error > 0 else 'short'}"
        )
    if plan.hint:
        console.print(plan.hint)


def _others(plan: Plan) -> Sequence[Forecast]:
    """The best of what else was tried."""
    others = (f for f in plan.tried if f not in (plan.present, plan.advised))
    return list(others)[:MAX_OTHERS]


def _record(plan: Plan) -> dict[str, object]:
    return {
        "settings": plan.settings,
        "hint": plan.hint,
        "num_devices": plan.num_devices,
        "figures": asdict(plan.figures),
        "present": asdict(plan.present),
        "advised": asdict(plan.advised),
        "tried": [asdict(forecast) for forecast in plan.tried],
        "simulation_error": plan.error,
        "earlier": [asdict(earlier) | {"error": earlier.error} for earlier in plan.earlier],
    }
