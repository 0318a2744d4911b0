"""`curve RUN_DIR`: learning curve and summary of a run, also of one that goes on or was stopped."""

from __future__ import annotations

import argparse
import sys
from typing import Final

from rich.console import Console

from areal_sc.commands.arguments import add_run_dir, run_folder
from areal_sc.errors import CommandError
from areal_sc.records.learning_curve import plot_learning_curve
from areal_sc.records.metrics import summarize
from areal_sc.records.metrics_log import History
from areal_sc.trainer.display import summary_table

COMMAND: Final = dict(
    help="draw the learning curve of a run, and show its summary",
    description="Draws learning_curve.png from the run's metrics.jsonl, and shows the summary "
    "that follows from it. A finished run has both already; the run may go on meanwhile, or "
    "have been stopped.",
)

add_arguments = add_run_dir


def run(arguments: argparse.Namespace) -> None:
    """Raises: CommandError: there is nothing to draw. RunFolderError: the run cannot be read."""
    folder = run_folder(arguments)
    if not folder.metrics_path.exists():
        raise CommandError(f"there is no {folder.metrics_path}: the run has not begun to train")
    history = History.read(folder.metrics_path)
    plot_learning_curve(history, folder.path.name, folder.learning_curve_path)
    summary = summarize(
        history.steps, history.evaluations, num_worker_restarts=history.num_worker_restarts
    )
    sys.stdout.write(f"{len(history.steps)} steps: {folder.learning_curve_path}\n")
    Console().print(summary_table(summary))
