"""What an update reports: the metrics of all micro-batches and ranks, combined."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from areal_sc.algorithms.losses import Metric, Metrics
from areal_sc.engines.training.process_group import ProcessGroup


@dataclass
class UpdateMetrics:
    """Collects over the updates of one call.

    Attributes:
        metrics: this rank's, by name, on the device.
        gradient_norms: global norm of each update, before clipping; one with a norm that is not
            finite was skipped.
        num_micro_batches: of each rank.
    """

    metrics: Metrics = field(default_factory=dict)
    gradient_norms: list[float] = field(default_factory=list)
    num_micro_batches: int = 0

    def add(self, **metrics: Metric) -> None:
        """Adds those of one micro-batch, of the same names on every rank."""
        for name, metric in metrics.items():
            self.metrics[name] = self.metrics[name] + metric if name in self.metrics else metric

    def summary(
        self, group: ProcessGroup, *, num_tokens: int, num_loss_tokens: int, lr: float
    ) -> dict[str, float]:
        """The same numbers on every rank.

        Args:
            group: ranks that compute different tokens.
            num_tokens: tokens of the rows of all ranks, trained or not.
            num_loss_tokens: trained tokens of all ranks.
            lr: learning rate of the step.
        Returns: every metric that the loss gave, and `entropy`; `loss` and `grad_norm`, means over
            the updates; `lr`; and `num_tokens`, `num_loss_tokens`, `num_effective_tokens`,
            `num_updates`, `num_skipped_updates`, `num_micro_batches` (of each rank). Effective
            tokens are trained ones that go through the model: not those of rows of advantage 0.
            Without any, means over them are NaN.
        """
        combined = self._combined(group)
        made = [norm for norm in self.gradient_norms if math.isfinite(norm)]
        loss = combined.pop("loss", 0.0) / max(1, len(self.gradient_norms))
        return {
            "loss": loss,
            "grad_norm": sum(made) / max(1, len(made)),
            "lr": lr,
            "num_tokens": float(num_tokens),
            "num_loss_tokens": float(num_loss_tokens),
            "num_effective_tokens": 0.0,  # unless there are any
            "num_updates": float(len(made)),
            "num_skipped_updates": float(len(self.gradient_norms) - len(made)),
            "num_micro_batches": float(self.num_micro_batches),
            **combined,
        }

    def _combined(self, group: ProcessGroup) -> dict[str, float]:
        """Each metric of all ranks."""
        if not self.metrics:
            return {}
        metrics = self.metrics.values()
        values = torch.stack([metric.value for metric in metrics]).double().cpu()
        weights = torch.tensor([metric.weight for metric in metrics], dtype=torch.float64)
        largest = group.max(values.clone()).tolist()
        totals, weights = group.sum(torch.stack([values, weights]))
        means = (totals / weights).tolist()  # 0 / 0 is NaN
        found = {"max": largest, "sum": totals.tolist(), "mean": means}
        return {name: found[m.combine][i] for i, (name, m) in enumerate(self.metrics.items())}
