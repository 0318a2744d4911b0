"""What the newest steps of a run took, in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean
from typing import Final

from areal_sc.records.metrics import StepMetrics

MIN_STEPS: Final = 8
"""Fewer say little: batches differ, and so do their answers."""
MAX_STEPS: Final = 60
"""The newest ones; answers get longer, or shorter, while a model learns."""


@dataclass(frozen=True)
class OperatingPoint:
    """What a user chooses.

    Attributes:
        num_train_workers: ranks (`actor.parallel`).
        num_rollout_workers: `rollout.num_workers`.
        max_staleness: `rollout.max_staleness`.
    """

    num_train_workers: int
    num_rollout_workers: int
    max_staleness: int

    @property
    def split(self) -> tuple[int, int]:
        """The numbers of workers that train and that generate."""
        return self.num_train_workers, self.num_rollout_workers

    @classmethod
    def of(cls, metrics: StepMetrics) -> OperatingPoint:
        return cls(metrics.num_train_workers, metrics.num_rollout_workers, metrics.max_staleness)


@dataclass(frozen=True)
class MeasuredTimes:
    """Means over steps at one operating point.

    Attributes:
        first_step, last_step: those that were looked at.
        step_s: of a step.
        wait_s: of it, in which the trainer waited for the batch.
        train_s: of it, in which the ranks trained. What is left is publication, and what the
            script does.
        busy_share: of the time, in which a server had answers to go on with.
        answer_s: that the answers of a step took on their servers, all of them together.
        group_s: from the start of a group on its worker until its rows are there.
    """

    point: OperatingPoint
    first_step: int
    last_step: int
    step_s: float
    wait_s: float
    train_s: float
    busy_share: float
    answer_s: float
    group_s: float


def measured_times(steps: Sequence[StepMetrics]) -> MeasuredTimes | None:
    """Times at the operating point of the last step.

    Returns: None: its steps are too few, or workers have not counted what they did.
    """
    if not steps:
        return None
    point = OperatingPoint.of(steps[-1])
    newest = [*takewhile(lambda step: OperatingPoint.of(step) == point, reversed(steps))]
    newest = newest[:MAX_STEPS][::-1]
    # admission settles first
    newest = newest[min(len(newest) // 2, 2 + 2 * point.max_staleness) :]
    group_times = [step.group_time_s for step in newest if step.group_time_s is not None]
    if len(newest) < MIN_STEPS or not point.num_train_workers or not group_times:
        return None
    busy, answer_s = busy_share(newest), [new_s for new_s, _ in _added(newest, "answer_s")]
    if not busy or not any(answer_s):
        return None
    return MeasuredTimes(
        point,
        first_step=newest[0].step,
        last_step=newest[-1].step,
        step_s=fmean(step.step_time_s for step in newest),
        wait_s=fmean(step.wait_s for step in newest),
        train_s=fmean(step.train_s for step in newest),
        busy_share=busy,
        answer_s=fmean(answer_s),
        group_s=fmean(group_times),
    )


def busy_share(steps: Sequence[StepMetrics]) -> float | None:
    """Share of the time after the first step in which a server had answers; None: unknown."""
    added = _added(steps, "busy_s")
    servers_s = sum(step.step_time_s * step.num_rollout_workers for _, step in added)
    return min(1.0, sum(busy_s for busy_s, _ in added) / servers_s) if servers_s else None


def _added(steps: Sequence[StepMetrics], counter: str) -> list[tuple[float, StepMetrics]]:
    """What each step but the first has added to a counter, and the step.

    Steps in which it began anew, as that of a worker that was started again, are left out.
    """
    found = []
    for before, now in pairwise(steps):
        added = now.counters.get(counter, 0.0) - before.counters.get(counter, 0.0)
        if counter in before.counters and added >= 0:
            found.append((added, now))
    return found
