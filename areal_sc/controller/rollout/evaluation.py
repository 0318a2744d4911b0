"""What an evaluation gives, and means of the workflows' own metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from areal_sc.errors import WorkflowError
from areal_sc.records.estimates import accuracy_interval, pass_at_k
from areal_sc.rejection import Rejection
from areal_sc.workers.calls import EvaluationReply

MetricSums = Mapping[str, tuple[float, int]]
"""Metric -> (sum, number of episodes)."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """What the answers to the evaluated prompts gave.

    Attributes:
        num_prompts: that were evaluated.
        num_rejected: answers whose episode was rejected: they count as wrong in `accuracy`, and
            are in no other mean.
        reward: mean over the other answers; so are the metrics, but for `accuracy`.
        metrics: means of the workflow's metrics.
        versions: lowest and highest policy version that sampled a token.
        num_samples: answers of each prompt.
        accuracy_interval: bounds that hold the accuracy over all such prompts with 95 %
            confidence, see `estimates`; None: no accuracy between 0 and 1 was reported.
        pass_at_k: k -> estimate for 1, 2, 4, ... up to `num_samples`; empty for one answer.
        first_rejection: why the first of the rejected ones was.
    """

    num_prompts: int
    num_rejected: int
    reward: float
    metrics: dict[str, float]
    versions: tuple[int, int]
    num_samples: int = 1
    accuracy_interval: tuple[float, float] | None = None
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    first_rejection: Rejection | None = None

    @classmethod
    def of(cls, replies: Sequence[EvaluationReply], num_samples: int = 1) -> EvaluationOutcome:
        """What the workers' replies tell.

        Args:
            replies: those to all answers of the first prompt, then of the next one, and so on.
            num_samples: answers of each prompt.
        Raises: WorkflowError: every answer was rejected, so there is no mean.
        """
        rewards = [reply.reward for reply in replies if reply.reward is not None]
        done = [reply for reply in replies if reply.reward is not None]
        rejections = [r.rejection for r in replies if r.rejection is not None]
        if not done:
            raise WorkflowError(
                f"all {len(replies)} answers of the evaluation were rejected; for example: "
                f"{rejections[0].describe() if rejections else 'there was none'}"
            )
        metrics = mean_metrics(
            [{name: (value, 1) for name, value in reply.metrics.items()} for reply in done]
        )
        interval, passed = None, dict[int, float]()
        if "accuracy" in metrics:
            answers = [reply.metrics.get("accuracy", 0.0) for reply in replies]  # rejected: 0
            metrics["accuracy"] = sum(answers) / len(answers)
            starts = range(0, len(answers), num_samples)
            of_prompts = [answers[start : start + num_samples] for start in starts]
            if all(0 <= value <= 1 for value in answers):
                interval = accuracy_interval(of_prompts)
            if num_samples > 1:
                exponents = range(num_samples.bit_length())
                passed = {2**it: pass_at_k(of_prompts, 2**it) for it in exponents}
        return cls(
            num_prompts=len(replies) // num_samples,
            num_rejected=len(rejections),
            reward=sum(rewards) / len(rewards),
            metrics=metrics,
            num_samples=num_samples,
            accuracy_interval=interval,
            pass_at_k=passed,
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
