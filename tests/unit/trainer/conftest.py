"""A plausible training step and evaluation, for tests of what is shown and written."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from areal_sc.config.schema import CheckpointConfig, EvaluationConfig, GenerationConfig, GRPOConfig
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import MetricsLog
from areal_sc.records.trackers.base import Tracker
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.advice import Adviser
from areal_sc.trainer.display import make_display
from areal_sc.trainer.run import Run


class Follower(Tracker):
    """Keeps what it is told; stands in for its own thread, too."""

    def tell(self, event: Callable[[Tracker], None]) -> None:
        event(self)

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_step(self, metrics: StepMetrics) -> None:
        self.told.append(metrics)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self.told.append(result)

    def on_model(self, step: int, folder: Path) -> None:
        self.told.append((step, folder))


@pytest.fixture
def follower() -> Follower:
    return Follower()


@pytest.fixture
def run(tmp_path: Path, follower: Follower) -> Iterator[Run]:
    """With a folder, a metrics file and a display, but without workers."""
    config = GRPOConfig(
        run_dir=str(tmp_path / "run"),
        total_steps=100,
        generation=GenerationConfig(temperature=0.75),
        evaluation=EvaluationConfig(num_prompts=7),
        checkpoint=CheckpointConfig(every_steps=1, every_minutes=0),
    )
    run = Run(config)
    run._adviser = Adviser(config, Path(config.run_dir))
    run._trackers = [follower]  # type: ignore[list-item]  # told at once
    with RunFolder(config.run_dir) as run.folder:
        run.folder.open(config_text="seed: 0")
        run.display = make_display(Console(file=io.StringIO(), force_terminal=False))
        with closing(MetricsLog(run.folder.metrics_path)) as run.log:
            yield run


def shown(run: Run) -> str:
    """What the run's display has shown."""
    file = run.display._console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()
