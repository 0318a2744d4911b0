"""What follows a run: its metrics file, its display, and whatever a user adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sc.records.metrics import EvaluationResult, StepMetrics, Summary


@dataclass(frozen=True)
class RunDescription:
    """What a tracker may want to know of a run before its first step.

    Attributes:
        id: names the run for ever; a run that is resumed keeps it.
        name: of the run folder.
        folder: the run folder, absolute.
        project: `tracker_project` of the settings.
        settings: all of them, as plain mappings, lists, numbers and texts.
    """

    id: str
    name: str
    folder: Path
    project: str
    settings: Mapping[str, Any]


class Tracker:
    """Is told what happens in a run; derive from it, and override what you need.

    A run calls all of these on one thread that belongs to this tracker alone, in the order in
    which things happen. The run does not wait: a tracker that is slow, hangs or raises costs a
    warning, and some of what it would have been told.

        class Printer(Tracker):
            def on_step(self, metrics):
                print(metrics.step, metrics.reward)
    """

    def on_start(self, run: RunDescription) -> None:
        """The run begins, or goes on after a crash."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A training step is done, and its weights are published."""

    def on_evaluation(self, result: EvaluationResult) -> None:
        """An evaluation is done."""

    def on_model(self, step: int, folder: Path) -> None:
        """A model lies in `folder`, in Hugging Face layout, as it was after `step` steps."""

    def on_finish(self, summary: Summary) -> None:
        """The run is finished, and all of its files are written."""

    def close(self) -> None:
        """Nothing more comes, also after a failure or Ctrl-C."""
