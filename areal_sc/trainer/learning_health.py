"""Whether a run still learns: the most likely cause of what goes wrong, told once while it holds.

    a step, an evaluation ──► `Course`: means with their errors ──► `RULES` ──► one cause

Rules compare a run with itself: what is usual for an entropy or a reward differs from task to task.
"""

from __future__ import annotations

from typing import Final

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.metrics_log import History
from areal_sc.records.trackers.base import Tracker
from areal_sc.trainer.learning_course import NUM_STEPS, Course
from areal_sc.trainer.learning_rules import RULES

NUM_STEPS_KEPT: Final = 2 * NUM_STEPS
"""Steps for which a rule that holds no more still counts: numbers waver about its limit."""

MAX_MISMATCH: Final = {Dtype.float32: 1000.0, Dtype.bfloat16: 2.0, Dtype.float16: 2.0}
"""How far trainer and sampler may differ in the mean about the same weights, in units of the noise
that the trainer has measured (`engines/rounding.py`). Rounding gave 0.3 to 1 in 16 bits. In float32
it gave 1.3, and ten times as much with a server whose kernels approximate."""


class LearningHealth(Tracker):
    """Follows a run.

    Args:
        dtype: of the trainer's computation.
    """

    def __init__(self, dtype: Dtype = Dtype.float32) -> None:
        self._course = Course(MAX_MISMATCH[dtype])
        self._num_evaluations = 0
        self._cause: tuple[str, str] | None = None  # a rule, and what it has seen
        self._last_seen = 0  # the step at which it spoke last
        self._untold: list[str] = []

    @property
    def complaints(self) -> dict[str, str]:
        """The most likely cause of what is wrong, by the name of its rule.

        It stands until it has not been seen for `NUM_STEPS_KEPT` steps.
        """
        return {} if self._cause is None else dict([self._cause])

    def remember(self, history: History) -> None:
        """Judges what is new in the records of a run, each evaluation after its step."""
        for metrics in history.steps[self._course.num_steps :]:
            self._remember_evaluations(history, metrics.step)
            self.on_step(metrics)
        if history.steps:
            self._remember_evaluations(history, history.steps[-1].step + 1)

    def _remember_evaluations(self, history: History, before_step: int) -> None:
        for result in history.evaluations[self._num_evaluations :]:
            if result.step >= before_step:
                return
            self.on_evaluation(result)

    def take_untold(self) -> list[str]:
        """What has gone wrong since this was asked last."""
        untold, self._untold = self._untold, []
        return untold

    def on_step(self, metrics: StepMetrics) -> None:
        """Judges the newest steps."""
        self._course.add_step(metrics)
        self._judge()

    def on_evaluation(self, result: EvaluationResult) -> None:
        """Judges held-out prompts beside the training so far."""
        self._num_evaluations += 1
        self._course.add_evaluation(result)
        self._judge()

    def _judge(self) -> None:
        now = self._course.num_steps
        if now < NUM_STEPS:
            return
        if now - self._last_seen >= NUM_STEPS_KEPT:
            self._cause = None
        for name, rule in RULES.items():
            before = None if self._cause is None else self._cause[0]
            if text := rule(self._course):
                if name != before:
                    self._untold.append(text)
                self._cause, self._last_seen = (name, text), now
                return
            if name == before:
                return  # what follows from it may still be seen
