"""trackio: Hugging Face's tracker, whose files stay on this machine (`trackio show`)."""

from __future__ import annotations

from typing import Any

from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.trackers.base import RunDescription, Tracker
from areal_sc.records.trackers.scalars import evaluation_scalars, step_scalars


class TrackioTracker(Tracker):
    """Writes where trackio always does (`TRACKIO_DIR`); a resumed run goes on under its name."""

    _run: Any

    def on_start(self, run: RunDescription) -> None:
        import trackio

        self._run = trackio.init(
            run.project,
            name=f"{run.name}-{run.id[:6]}",
            config=dict(run.settings),
            resume="allow",
            embed=False,
            auto_log_cpu=False,
        )

    def on_step(self, metrics: StepMetrics) -> None:
        self._run.log(step_scalars(metrics), step=metrics.step)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._run.log(evaluation_scalars(result), step=result.step)

    def close(self) -> None:
        self._run.finish()
