"""What is evaluated, what it gives, and means of the workflows' own metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from areal_sc.errors import WorkflowError
from areal_sc.records.estimates import Estimate, accuracy, majority, mean_of, pass_at_k
from areal_sc.rejection import Rejection
from areal_sc.sources.row_file import PromptSource
from areal_sc.workers.calls import EvaluationReply
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.trajectory import ACCURACY, STOPPED

T = TypeVar("T")

MetricSums = Mapping[str, tuple[float, int]]
"""Metric -> (sum, number of episodes)."""


@dataclass(frozen=True)
class EvaluationSet:
    """Held-out prompts, and how they are answered.

    Attributes:
        prompts: a dataset, a list of dicts, or a stream of dicts.
        workflow: the episode; None: that of the evaluation.
        num_prompts: the first so many are evaluated; None: all.
        num_samples: answers a prompt, >= 1; None: `evaluation.num_samples`.
        temperature: of the answers; 0 is greedy, with one answer a prompt; None: as the run's.
    """

    prompts: PromptSource
    workflow: Workflow | None = None
    num_prompts: int | None = None
    num_samples: int | None = None
    temperature: float | None = None


Keep = Callable[[int, int, int, EvaluationReply], None]
"""Called with each reply: number of the set, of the prompt and of its answer, all from 0."""

Known = Mapping[tuple[int, int, int], EvaluationReply]
"""Replies that there are already, by the same numbers: these answers are not generated."""


@dataclass(frozen=True)
class EvaluationOutcome:
    """What the answers to the evaluated prompts gave.

    An answer that was rejected or cut counts as wrong.

    Attributes:
        num_prompts: that were evaluated.
        num_rejected: answers whose episode was rejected; `rejected` has their causes. They are in
            no mean but `accuracy`.
        reward: mean over the other answers; so are the metrics, but for `accuracy`.
        metrics: means of the workflow's metrics.
        versions: lowest and highest policy version that sampled a token.
        num_samples: answers of each prompt; 0: of several sets, which have different numbers.
        num_cut: answers that did not end by themselves, as far as the workflow tells.
        right: for each prompt, how right each answer is, 0 to 1; None: there is no such accuracy.
        accuracy_interval: bounds that hold the accuracy over all such prompts with 95 %
            confidence, see `estimates`; None as `right`.
        pass_at_k: k -> estimate for 1, 2, 4, ... up to `num_samples`; empty for one answer.
        majority: accuracy of the most frequent answer; None: one answer, or no reward tells votes.
        first_rejection: why the first of the rejected ones was.
    """

    num_prompts: int
    num_rejected: int
    reward: float
    metrics: dict[str, float]
    versions: tuple[int, int]
    num_samples: int = 1
    num_cut: int = 0
    rejected: Mapping[str, int] = field(default_factory=dict)
    right: tuple[tuple[float, ...], ...] | None = None
    accuracy_interval: tuple[float, float] | None = None
    pass_at_k: Mapping[int, float] = field(default_factory=dict)
    majority: float | None = None
    first_rejection: Rejection | None = None

    @classmethod
    def of(
        cls, replies: Sequence[EvaluationReply], num_samples: int = 1, *, cut_is_wrong: bool = True
    ) -> EvaluationOutcome:
        """What the workers' replies tell.

        Args:
            replies: those to all answers of the first prompt, then of the next one, and so on.
            num_samples: answers of each prompt.
            cut_is_wrong: whatever the workflow says of the accuracy of an answer that was cut.
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
        right, interval, passed, most = None, None, dict[int, float](), None
        if ACCURACY in metrics:
            wrong = [r.reward is None or (cut_is_wrong and _is_cut(r)) for r in replies]
            values = [
                0.0 if is_wrong else reply.metrics.get(ACCURACY, 0.0)
                for reply, is_wrong in zip(replies, wrong, strict=True)
            ]
            metrics[ACCURACY] = sum(values) / len(values)
            of_prompts = _of_prompts(values, num_samples)
            if all(0 <= value <= 1 for value in values):
                right, estimate = of_prompts, accuracy(of_prompts)
                interval = estimate.low, estimate.high
            if num_samples > 1:
                exponents = range(num_samples.bit_length())
                passed = {2**it: pass_at_k(of_prompts, 2**it) for it in exponents}
                votes = [
                    None if is_wrong else reply.vote
                    for reply, is_wrong in zip(replies, wrong, strict=True)
                ]
                if any(vote is not None for vote in votes):
                    most = majority(_of_prompts(votes, num_samples), of_prompts)
        return cls(
            num_prompts=len(replies) // num_samples,
            num_rejected=len(rejections),
            reward=sum(rewards) / len(rewards),
            metrics=metrics,
            num_samples=num_samples,
            num_cut=sum(map(_is_cut, done)),
            rejected=dict(Counter(rejection.cause for rejection in rejections)),
            right=right,
            accuracy_interval=interval,
            pass_at_k=passed,
            majority=most,
            versions=(
                min(reply.versions[0] for reply in done),
                max(reply.versions[1] for reply in done),
            ),
            first_rejection=rejections[0] if rejections else None,
        )

    @classmethod
    def together(cls, outcomes: Sequence[EvaluationOutcome]) -> EvaluationOutcome:
        """Several sets as one: each set counts alike, however many prompts it has.

        A number that one of them does not have is missing.
        """
        count = len(outcomes)
        names = set.intersection(*(set(it.metrics) for it in outcomes))
        metrics = {name: sum(it.metrics[name] for it in outcomes) / count for name in names}
        ks = set.intersection(*(set(it.pass_at_k) for it in outcomes))
        majorities = [it.majority for it in outcomes if it.majority is not None]
        intervals = [
            Estimate(it.metrics[ACCURACY], *it.accuracy_interval)
            for it in outcomes
            if it.accuracy_interval is not None
        ]
        whole = mean_of(intervals) if len(intervals) == count else None
        numbers = {it.num_samples for it in outcomes}
        rejected = Counter[str]()
        for outcome in outcomes:
            rejected.update(outcome.rejected)
        return cls(
            num_prompts=sum(it.num_prompts for it in outcomes),
            num_rejected=sum(it.num_rejected for it in outcomes),
            reward=sum(it.reward for it in outcomes) / count,
            metrics=dict(sorted(metrics.items())),
            versions=(
                min(it.versions[0] for it in outcomes),
                max(it.versions[1] for it in outcomes),
            ),
            num_samples=numbers.pop() if len(numbers) == 1 else 0,
            num_cut=sum(it.num_cut for it in outcomes),
            rejected=dict(rejected),
            accuracy_interval=None if whole is None else (whole.low, whole.high),
            pass_at_k={k: sum(it.pass_at_k[k] for it in outcomes) / count for k in sorted(ks)},
            majority=sum(majorities) / count if len(majorities) == count else None,
            first_rejection=next((it.first_rejection for it in outcomes if it.rejected), None),
        )


def _of_prompts(values: Sequence[T], num_samples: int) -> tuple[tuple[T, ...], ...]:
    starts = range(0, len(values), num_samples)
    return tuple(tuple(values[start : start + num_samples]) for start in starts)


def _is_cut(reply: EvaluationReply) -> bool:
    return reply.metrics.get(STOPPED) == 0


def mean_metrics(parts: Sequence[MetricSums]) -> dict[str, float]:
    """Means over all episodes of all parts; a metric counts where it was reported."""
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, (total, count) in part.items():
            old_total, old_count = totals.get(name, (0.0, 0))
            totals[name] = (old_total + total, old_count + count)
    return {name: total / count for name, (total, count) in totals.items() if count}
