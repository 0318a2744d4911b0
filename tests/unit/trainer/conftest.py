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
from areal_sc.run.run_folder import RunFolder
from areal_sc.trainer.advice import Adviser
from areal_sc.trainer.display import make_display
from areal_sc.trainer.metrics import EvaluationResult, StepMetrics
from areal_sc.trainer.metrics_log import MetricsLog
from areal_sc.trainer.run import Run
from areal_sc.trainer.trackers.base import Tracker


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


def with_workflow(changes: dict[str, Any]) -> dict[str, Any]:
    """`accuracy` stands for the workflow's metric of that name; None: it reports none."""
    if "accuracy" in changes:
        accuracy = changes.pop("accuracy")
        changes["workflow"] = {} if accuracy is None else {"accuracy": accuracy}
    return changes


@pytest.fixture
def make_step() -> Callable[..., StepMetrics]:
    def make(step: int = 1, **changes: Any) -> StepMetrics:
        values: dict[str, Any] = {
            "step": step,
            "reward": 0.25,
            "workflow": {"accuracy": 0.2},
            "train": {
                "loss": 0.0123,
                "entropy": 1.25,
                "grad_norm": 0.61,
                "proximal_kl": 1.5e-4,
                "behavior_kl": 0.02,
            },
            "group_staleness_mean": 1.3,
            "group_staleness_max": 9,
            "signal_share": 0.4,
            "lead": 1.5,
            "slack": 0.3,
            "token_staleness_mean": 0.9,
            "token_staleness_max": 4,
            "num_rows": 256,
            "num_generated_tokens": 6000,
            "num_trained_tokens": 4000,
            "step_time_s": 0.5,
            "wait_s": 0.05,
            "train_s": 0.4,
            "sync_s": 0.02,
        }
        return StepMetrics(**values | with_workflow(changes))

    return make


@pytest.fixture
def make_evaluation() -> Callable[..., EvaluationResult]:
    def make(name: str = "before", **changes: Any) -> EvaluationResult:
        values: dict[str, Any] = {
            "name": name,
            "step": 0,
            "reward": 0.2,
            "workflow": {"accuracy": 0.2},
            "num_prompts": 64,
            "version_min": 0,
            "version_max": 0,
            "temperature": 1.0,
        }
        return EvaluationResult(**values | with_workflow(changes))

    return make
