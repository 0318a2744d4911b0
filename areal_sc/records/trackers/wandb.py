"""Weights & Biases; offline with its own `WANDB_MODE=offline`."""

from __future__ import annotations

import logging
from dataclasses import asdict
from typing import Any

from areal_sc.errors import ConfigError
from areal_sc.records.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.records.trackers.base import RunDescription, Tracker
from areal_sc.records.trackers.scalars import evaluation_scalars, step_scalars

logger = logging.getLogger(__name__)


class WandbTracker(Tracker):
    """Files lie in `<run folder>/wandb`; a run that is resumed goes on under its id.

    Asks for an account when it is made, on a terminal and where none is known yet.

    Raises: ConfigError: there is no account, and nobody to ask.
    """

    _run: Any

    def __init__(self) -> None:
        import wandb

        try:
            wandb.login()
        except wandb.errors.UsageError as error:
            raise ConfigError(
                f"trackers: wandb: {error}; call `wandb login` once, or set WANDB_MODE=offline"
            ) from error

    def on_start(self, run: RunDescription) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),  # the terminal is the display's
        )
        if not self._run.offline:
            logger.info("wandb=%s", self._run.url)

    def on_step(self, metrics: StepMetrics) -> None:
        self._run.log(step_scalars(metrics), step=metrics.step)

    def on_evaluation(self, result: EvaluationResult) -> None:
        # wandb takes no steps back, and evaluations end after later steps
        self._run.log(evaluation_scalars(result))

    def on_finish(self, summary: Summary) -> None:
        self._run.summary.update(asdict(summary))

    def close(self) -> None:
        self._run.finish()
