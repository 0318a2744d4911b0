"""Whatever a loss reports is in the summary, combined as its declaration says."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areal_sc.algorithms.losses import Metric, checked
from areal_sc.engines.training.updates.update_metrics import UpdateMetrics
from areal_sc.errors import WorkflowError


class TwoRanks:
    """The other rank has the same numbers, once more, but for those that are given."""

    device = torch.device("cpu")

    def __init__(self, **others: tuple[str, float, float]) -> None:
        self.others = others

    def gather(self, value: Any) -> list[Any]:
        message, metrics, worst = value
        return [value, (message, metrics | self.others, worst)]


def summary(metrics: UpdateMetrics, **others: tuple[str, float, float]) -> dict[str, float]:
    world: Any = TwoRanks(**others)
    return metrics.summary(
        world, is_counted=True, own_tokens={"num_tokens": 10}, num_loss_tokens=4, lr=0.5
    )


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
    found = summary(metrics, largest=("max", 9.0, 0.0), other=("mean", 3.0, 2.0))
    assert found["other"] == 1.5  # of one rank alone
    assert (found["surprise"], found["count"], found["largest"]) == (4.0, 6.0, 9.0)
    assert (found["loss"], found["grad_norm"], found["num_tokens"]) == (32.0, 2.0, 20.0)


def test_the_largest_of_micro_batches_counts() -> None:
    first, second = (Metric.max(torch.tensor(values)) for values in ([3.0, 5.0], [4.0]))
    assert (first + second).value == 5.0
    assert Metric.max(torch.zeros(0)).value == 0.0


def test_a_metric_has_one_kind_in_all_micro_batches_and_on_all_ranks() -> None:
    metrics = UpdateMetrics()
    metrics.add(seen=Metric.sum(torch.tensor([2.0])))
    with pytest.raises(ValueError, match=r"metric 'seen': .* got max and sum"):
        metrics.add(seen=Metric.max(torch.tensor([7.0])))
    with pytest.raises(WorkflowError, match=r"the loss: metric 'seen': .* got mean and sum"):
        summary(metrics, seen=("mean", 50.0, 10.0))


def test_without_tokens_a_mean_is_nan_and_the_rest_is_zero() -> None:
    metrics = UpdateMetrics()
    metrics.add(entropy=Metric.mean(torch.zeros(0)))
    found = summary(metrics)
    assert found["entropy"] != found["entropy"]
    assert (found["loss"], found["num_effective_tokens"]) == (0.0, 0.0)
    assert summary(UpdateMetrics())["loss"] == pytest.approx(0.0)


def test_what_is_not_finite_is_reported_and_passes_over_nothing() -> None:
    metrics = UpdateMetrics()
    metrics.add(largest=Metric.max(torch.tensor([2.0])), total=Metric.sum(torch.tensor([math.inf])))
    found = summary(metrics, largest=("max", math.nan, 0.0), total=("sum", -math.inf, 0.0))
    assert math.isnan(found["largest"])
    assert math.isnan(found["total"])


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (0.5, "metric a: expected a Metric of one number, got 0.5; Metric.mean"),
        (None, "expected a Metric of one number, got None"),
        (Metric(torch.ones(2), "sum"), "expected a Metric of one number"),
        (Metric(torch.ones(()), "min"), "expected a Metric of one number"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_metric_is_refused_where_it_is_made(metric: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        checked((torch.ones(()), {"a": metric}))


def test_a_metric_does_not_stand_for_a_number_of_the_step() -> None:
    with pytest.raises(TypeError, match="metric num_updates: a step reports a number of its own"):
        checked((torch.ones(()), {"num_updates": Metric.sum(torch.ones(1))}))


def test_an_update_without_a_gradient_is_none() -> None:
    metrics = UpdateMetrics(gradient_norms=[2.0, 0.0, math.nan])
    found = summary(metrics)
    assert (found["num_updates"], found["num_skipped_updates"], found["grad_norm"]) == (1, 1, 2.0)
    assert summary(UpdateMetrics(gradient_norms=[0.0]))["grad_norm"] == 0.0
    assert math.isnan(summary(UpdateMetrics(gradient_norms=[0.0, math.inf]))["grad_norm"])
