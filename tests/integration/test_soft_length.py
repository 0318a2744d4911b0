"""A real worker takes from the rewards of rows what their sampled tokens cost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from areal_sc import SingleTurnWorkflow

LIMIT, MARGIN = 8, 6


def always_right(prompt: dict[str, Any], completion: str) -> float:
    return 1.0


def test_rows_that_are_trained_pay_and_evaluations_do_not(
    start_rollout: Callable[..., Any],
) -> None:
    prompts, workflow = [{"prompt": "ba="}], SingleTurnWorkflow(always_right)
    settings = {"limit_tokens": LIMIT, "margin_tokens": MARGIN, "penalty": 0.5}
    overrides = [f"rollout.soft_length.{k}={v}" for k, v in settings.items()]
    with start_rollout(*overrides, "generation.cut_answers=judged") as rollout:
        batch = rollout.prepare_batch(prompts, workflow)
        costs = []
        for row in batch.rows:
            num_tokens = sum(count for _, count in row.version_spans)
            costs.append(0.5 * min(1.0, max(0.0, (num_tokens - (LIMIT - MARGIN)) / MARGIN)))
            assert row.reward == pytest.approx(1.0 - costs[-1])
        assert max(costs) > 0, "some answers are long"
        mean = sum(costs) / len(costs)
        assert rollout.batch_metrics["length_penalty"] == pytest.approx(-mean)
        assert rollout.batch_metrics["accuracy"] == 1.0
        assert rollout.evaluate(prompts, workflow, num_prompts=1).reward == 1.0
