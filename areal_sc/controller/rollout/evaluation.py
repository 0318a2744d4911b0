"""What an evaluation gives, and means of the workflows' own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_sc.errors import WorkflowError
from areal_sc.rejection import Rejection
from areal_sc.workers.calls import EvaluationReply

MetricSums = Mapping[str, tuple[float, int]]
"""Metric -> (sum, number of episodes)."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """Means over the evaluated prompts.

    Attributes:
        num_prompts: those that are in the means.
        num_rejected: further prompts, whose episode was rejected.
        versions: lowest and highest policy version that sampled a token.
        first_rejection: why the first of them was.
    """

    num_prompts: int
    num_rejected: int
    reward: float
    metrics: dict[str, float]
    versions: tuple[int, int]
    first_rejection: Rejection | None = None

    @classmethod
    def of(cls, replies: Sequence[EvaluationReply]) -> EvaluationOutcome:
        """The means over the workers' replies, one a prompt.

        Raises: WorkflowError: every prompt was rejected, so there is no mean.
        """
        rewards = [reply.reward for reply in replies if reply.reward is not None]
        done = [reply for reply in replies if reply.reward is not None]
        rejections = [r.rejection for r in replies if r.rejection is not None]
        if not done:
            raise WorkflowError(
                f"all {len(replies)} evaluation prompts were rejected; for example: "
                f"{rejections[0].describe() if rejections else 'there was none'}"
            )
        return cls(
            num_prompts=len(done),
            num_rejected=len(rejections),
            reward=sum(rewards) / len(rewards),
            metrics=mean_metrics(
                [{name: (value, 1) for name, value in reply.metrics.items()} for reply in done]
            ),
            versions=(
                min(reply.versions[0] for reply in done),
                max(reply.versions[1] for reply in done),
            ),
            first_rejection=rejections[0] if rejections else None,
        )


def mean_metrics(parts: Sequence[MetricSums]) -> dict[str, float]:
    """Means over all episodes of all parts; a metric counts where it was reported."""
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            old_total, old_count = totals.get(name, (0.0, 0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}
