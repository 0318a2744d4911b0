"""TensorBoard, by its own writer, which needs neither TensorFlow nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.trackers.base import RunDescription, Tracker
from areal_sc.records.trackers.scalars import evaluation_scalars, step_scalars


class TensorBoardTracker(Tracker):
    """Writes to `<run folder>/tensorboard`: `tensorboard --logdir <run folder>` shows it."""

    _writer: Any

    def on_start(self, run: RunDescription) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run.folder / "tensorboard"))

    def on_step(self, metrics: StepMetrics) -> None:
        self._write(step_scalars(metrics), metrics.step)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._write(evaluation_scalars(result), result.step)

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()
