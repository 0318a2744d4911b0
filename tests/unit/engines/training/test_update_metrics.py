"""Whatever a loss reports is in the summary, combined as its declaration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal_sc.algorithms.losses import Metric
from areal_sc.engines.training.update_metrics import UpdateMetrics


class TwoRanks:
    """The other rank has the same numbers, once more; its largest one is 9."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        return torch.full_like(values, 9.0)


def summary(metrics: UpdateMetrics) -> dict[str, float]:
    group: Any = TwoRanks()
    return metrics.summary(group, num_tokens=20, num_loss_tokens=4, lr=0.5)


def test_every_metric_of_a_loss_is_reported() -> None:
    metrics = UpdateMetrics()
    for tokens in (torch.tensor([1.0, 2.0, 6.0]), torch.tensor([7.0])):
        metrics.add(
            surprise=Metric.mean(tokens),
            count=Metric.sum(tokens > 1.5),
            largest=Metric.max(tokens),
            loss=Metric.sum(tokens.sum()),
        )
    metrics.gradient_norms.append(2.0)
    found = summary(metrics)
    assert (found["surprise"], found["count"], found["largest"]) == (4.0, 6.0, 9.0)
    assert (found["loss"], found["grad_norm"], found["num_tokens"]) == (32.0, 2.0, 20.0)


def test_the_largest_of_micro_batches_counts() -> None:
    first, second = (Metric.max(torch.tensor(values)) for values in ([3.0, 5.0], [4.0]))
    assert (first + second).value == 5.0
    assert Metric.max(torch.zeros(0)).value == 0.0


def test_without_tokens_a_mean_is_nan_and_the_rest_is_zero() -> None:
    metrics = UpdateMetrics()
    metrics.add(entropy=Metric.mean(torch.zeros(0)))
    found = summary(metrics)
    assert found["entropy"] != found["entropy"]
    assert (found["loss"], found["num_effective_tokens"]) == (0.0, 0.0)
    assert summary(UpdateMetrics())["loss"] == pytest.approx(0.0)
