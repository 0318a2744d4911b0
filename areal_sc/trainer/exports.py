"""Models in Hugging Face layout that a run leaves on its way, written while training goes on.

<run_dir>/models/step-<n>/   what `transformers`, SGLang and vLLM load
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from areal_sc.controller.train import TrainController
from areal_sc.errors import CheckpointError


class ModelExports:
    """Writes one model at a time.

    Args:
        folder: holds one folder a step.
        record: keeps `model` and `model_failed`, each with its step, in the run's metrics.
    """

    def __init__(self, folder: Path, record: Callable[..., None]) -> None:
        self._folder = folder
        self._record = record
        self._running: tuple[int, Future[None]] | None = None

    def begin(self, actor: TrainController) -> None:
        """Takes the weights of the current policy version; the export before was collected."""
        assert self._running is None, "the export before is not collected"
        target = self._folder / f"step-{actor.version}"
        self._running = actor.version, actor.begin_save_hf(target)

    def collect(self, *, wait: bool) -> None:
        """Ends with the export that was begun, if any; without `wait`, if it is complete.

        Raises: CheckpointError: it could not be written; earlier ones are left as they were.
        """
        if self._running is None or not (wait or self._running[1].done()):
            return
        (step, written), self._running = self._running, None
        try:
            written.result()  # bounded by the time limit of the ranks' writing
        except CheckpointError as error:
            self._record("model_failed", step=step, error=str(error))
            raise
        self._record("model", step=step)
