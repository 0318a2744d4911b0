from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.schema import GRPOConfig
from areal_sc.preflight.load import load_config
from areal_sc.records.metrics import EvaluationResult, StepMetrics

MINIMAL = "run_dir: runs/test\ntotal_steps: 10\nactor: {path: no_such_model}\n"


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[..., Path]:
    """Writes a YAML file that, with the default text, has all that a run needs."""

    def write(text: str = MINIMAL, name: str = "x.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def load(write_yaml: Callable[..., Path]) -> Callable[..., GRPOConfig]:
    """Loads the minimal YAML with overrides, on a machine without CUDA devices."""

    def load_minimal(*overrides: str, num_devices: int = 0) -> GRPOConfig:
        argv = ["--config", str(write_yaml()), *overrides]
        return load_config(argv, GRPOConfig, count_devices=lambda: num_devices)

    return load_minimal


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
