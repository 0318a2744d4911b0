"""What an evaluation gives, and means of the workflows' own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MetricSums = Mapping[str, tuple[float, int]]
"""Metric -> (sum, number of rows)."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Means over the evaluated prompts.

    Attributes:
        versions: lowest and highest policy version that sampled a token.
        num_rejected: prompts whose episode was rejected; they are in no mean.
    """

    num_prompts: int
    num_rejected: int
    reward: float
    metrics: dict[str, float]
    versions: tuple[int, int]

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> EvaluationOutcome:
        """The means over the workers' replies, one a prompt."""
        done = [reply for reply in replies if reply["reward"] is not None]
        rewards = [float(reply["reward"]) for reply in done]
        versions = [version for reply in done for version in reply["versions"]]
        return cls(
            num_prompts=len(done),
            num_rejected=len(replies) - len(done),
            reward=sum(rewards) / max(1, len(rewards)),
            metrics=mean_metrics(
                [{name: (value, 1) for name, value in reply["metrics"].items()} for reply in done]
            ),
            versions=(min(versions, default=0), max(versions, default=0)),
        )


def mean_metrics(parts: Sequence[MetricSums]) -> dict[str, float]:
    """Means over all rows of all parts; a metric counts where it was reported."""
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            old_total, old_count = totals.get(name, (0.0, 0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}
