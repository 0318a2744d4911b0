"""Whether a run learns, judged again by the rules that the run itself goes by."""

from __future__ import annotations

from areal_sc.config.schema import Dtype
from areal_sc.records.metrics_log import History
from areal_sc.trainer.learning_health import LearningHealth


class FollowedHealth:
    """Tells each step and evaluation of a history to `LearningHealth`, in their order, once."""

    def __init__(self) -> None:
        self._epoch = -1
        self._health = LearningHealth()
        self._num_steps = self._num_evaluations = 0

    def complaints(self, epoch: int, history: History, dtype: Dtype) -> dict[str, str]:
        """What is wrong now, by the names of the rules.

        Args:
            epoch: of the history: with another one all of it is judged anew.
            dtype: of the trainer's computation.
        """
        if epoch != self._epoch or len(history.evaluations) < self._num_evaluations:
            self._epoch, self._health = epoch, LearningHealth(dtype)
            self._num_steps = self._num_evaluations = 0
        for metrics in history.steps[self._num_steps :]:
            self._tell_evaluations(history, metrics.step)
            self._health.on_step(metrics)
            self._num_steps += 1
        if history.steps:
            self._tell_evaluations(history, history.steps[-1].step + 1)
        return dict(self._health.complaints)

    def _tell_evaluations(self, history: History, before: int) -> None:
        for result in history.evaluations[self._num_evaluations :]:
            if result.step >= before:
                return
            self._health.on_evaluation(result)
            self._num_evaluations += 1
