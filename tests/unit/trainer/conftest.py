"""A plausible training step and evaluation, for tests of what is shown and written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics


@pytest.fixture
def make_step() -> Callable[..., StepMetrics]:
    def make(step: int = 1, **changes: Any) -> StepMetrics:
        values: dict[str, Any] = {
            "step": step,
            "reward": 0.25,
            "accuracy": 0.2,
            "group_staleness_mean": 1.3,
            "group_staleness_max": 9,
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
        return StepMetrics(**values | changes)

    return make


@pytest.fixture
def make_evaluation() -> Callable[..., EvaluationResult]:
    def make(name: str = "before", **changes: Any) -> EvaluationResult:
        values: dict[str, Any] = {
            "name": name,
            "step": 0,
            "reward": 0.2,
            "accuracy": 0.2,
            "num_prompts": 64,
            "version_min": 0,
            "version_max": 0,
            "temperature": 1.0,
        }
        return EvaluationResult(**values | changes)

    return make
