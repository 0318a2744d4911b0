"""`plan RUN_DIR`: the operating point that a run should have, by what its steps have taken."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, fields
from typing import Final

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from areal_sc.commands.arguments import add_run_dir, number, run_folder
from areal_sc.config.loading.differences import removed_of, settings_of
from areal_sc.config.loading.loader import compose_config
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import CommandError, ConfigError, RunFolderError
from areal_sc.planning.advice import MIN_STEPS, Plan, make_plan
from areal_sc.quantities import short_duration
from areal_sc.records.metrics_log import History
from areal_sc.run.run_folder import RunFolder
from areal_sc.system.json_lines import to_json

COMMAND: Final = dict(
    help="say how many workers should train and generate, and how stale data need be",
    description="Says which split of a run's devices between training and generation, and "
    "which rollout.max_staleness, would give the shortest step: by arithmetic on what its newest "
    "steps have taken. The run may go on meanwhile.",
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
    plan = make_plan(steps, config, arguments.devices)
    if plan is None:
        raise CommandError(
            f"the steps of {folder.path} tell too little: a plan needs about "
            f"{min(2 * (1 + config.rollout.staleness_bound), MIN_STEPS) + MIN_STEPS} steps with "
            f"the present split and bound (there are {len(steps)} steps in all), in which workers "
            "have counted how long they generate"
        )
    if arguments.json:
        record = asdict(plan) | {"settings": plan.settings}
        sys.stdout.write(to_json(record).decode() + "\n")
    else:
        _show(Console(), plan)


def config_of(folder: RunFolder) -> GRPOConfig:
    """The settings of a run, without those of its script.

    Raises: RunFolderError: they cannot be read. ConfigError: they are of another areal_sc.
    """
    try:
        text = folder.config_path.read_text(encoding="utf-8")
        content = yaml.safe_load(text)
    except (OSError, yaml.YAMLError) as error:
        raise RunFolderError(f"{folder.config_path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder.config_path} is not a mapping")
    known = {item.name for item in fields(GRPOConfig)}
    own = {name: value for name, value in content.items() if name in known}
    settings = settings_of(text)
    gone = removed_of(settings)
    if any(gone.values()):  # of an older areal_sc: those that said what holds now, too, say nothing
        own = {
            key: value
            for key, value in settings.items()
            if key.partition(".")[0] in known and not gone.get(key, False)
        }
    try:
        return compose_config(None, (), GRPOConfig, own)
    except ConfigError as error:
        raise ConfigError(
            f"{folder.config_path} is of another areal_sc, whose settings were other ones: {error}"
        ) from error


def _show(console: Console, plan: Plan) -> None:
    present, advised, times = plan.present, plan.advised, plan.times
    head = f"set {plan.settings}" if plan.settings else "stay: nothing that was tried is shorter"
    steps = f"(steps {times.first_step} to {times.last_step})"
    console.print(Text(f"{head} {steps}", style="bold"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in ("train", "rollout", "bound", "step", "training", "generation"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, forecast in [("now", present), *([("advised", advised)] if plan.settings else [])]:
        point = forecast.point
        times_s = (forecast.step_s, forecast.training_s, forecast.generation_s)
        table.add_row(
            name,
            f"{point.num_train_workers}",
            f"{point.num_rollout_workers}",
            f"{point.max_staleness}",
            *map(short_duration, times_s),
        )
    console.print(table)
    waits = f"the trainer waits {times.wait_s / times.step_s:.0%}"
    console.print(
        f"servers are busy {times.busy_share:.0%} of the time, {waits}, a group takes "
        f"{short_duration(times.group_s)}"
    )
