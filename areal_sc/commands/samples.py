"""`samples RUN_DIR`: what the model of a run read and wrote, also while the run goes on."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from areal_sc.commands.arguments import add_run_dir, number
from areal_sc.errors import CommandError
from areal_sc.records.samples import Place, Sample, read_samples
from areal_sc.run.run_checks import check_is_folder
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.evaluation.kept_answers import as_samples, read_answers
from areal_sc.trainer.sample_view import sample_view

COMMAND: Final = dict(
    help="show what the model of a run writes",
    description="Shows prompts of a run with the best and the worst answer of the model to "
    "each, and their rewards: those of the newest step, unless --step or --last says "
    "otherwise. A run keeps some of each step in samples.jsonl (samples.groups_per_step); it "
    "may go on meanwhile. Of a folder of `evaluate` it shows all answers.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's arguments."""
    add_run_dir(parser)
    parser.add_argument("--step", type=int, metavar="N", help="those of training step N")
    parser.add_argument(
        "--last", type=number("a number above 0", 1), metavar="N", help="the N newest answers"
    )
    place = parser.add_mutually_exclusive_group()
    for word in (Place.best, Place.worst):
        place.add_argument(
            f"--{word}",
            dest="place",
            action="store_const",
            const=word,
            help=f"only the {word} answer to each prompt",
        )


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there are no such samples. RunFolderError: they cannot be read."""
    samples = chosen(_samples_of(arguments.run_dir.expanduser()), arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # it is a file
    console = Console()
    for part in sample_view(samples, console):
        console.print(part, highlight=False)


def chosen(samples: Sequence[Sample], arguments: argparse.Namespace) -> Sequence[Sample]:
    """The samples that the command's words ask for.

    Raises: CommandError: there is none.
    """
    step, place = arguments.step, arguments.place
    if step is None and arguments.last is None:
        step = samples[-1].step
    found = [
        sample
        for sample in samples
        if step in (None, sample.step) and (place is None or sample.place in (place, Place.equal))
    ]
    if not found:
        steps = sorted({sample.step for sample in samples})
        raise CommandError(
            f"there are no samples of step {step}, only of {len(steps)} steps from {steps[0]} to "
            f"{steps[-1]}"
        )
    return found[-arguments.last :] if arguments.last else found


def _samples_of(run_dir: Path) -> Sequence[Sample]:
    check_is_folder(run_dir)
    path = RunFolder(run_dir).samples_path
    samples = read_samples(path) if path.exists() else as_samples(read_answers(run_dir))
    if not samples:
        raise CommandError(
            f"there are no samples in {run_dir}: the run has not begun its first training step, "
            "it was started with samples.groups_per_step=0, or this is not the folder of a run"
        )
    return samples
