"""What follows a run: its metrics file, its display, and whatever a user adds."""

from __future__ import annotations

from pathlib import Path

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary


class Tracker:
    """Is told what happens in a run; derive from it, and override what you need.

    Called on the thread of the training loop, which waits for it. What it raises ends the run.

        class Wandb(Tracker):
            def on_step(self, metrics):
                wandb.log(metrics.to_record(), step=metrics.step)
    """

    def on_step(self, metrics: StepMetrics) -> None:
        """A training step is done, and its weights are published."""

    def on_evaluation(self, result: EvaluationResult) -> None:
        """An evaluation is done."""

    def on_model(self, step: int, folder: Path) -> None:
        """A model lies in `folder`, in Hugging Face layout, as it was after `step` steps."""

    def on_finish(self, summary: Summary) -> None:
        """The run is finished, and all of its files are written."""
