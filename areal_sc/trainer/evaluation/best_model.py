"""The best model of a run, by a number of its evaluations, and whether it gets any better.

    a periodic evaluation begins ──► the model of that step is written to models/step-<n>, too
    its result comes             ──► better: models/best leads there; else the model is deleted

A beaten model stays until a snapshot is on the disk that is not older than the better one: a run
that goes on from an earlier snapshot has not got the better one any more.

What is the best follows from the results in the metrics file, so a run that goes on knows it.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from areal_sc.errors import ConfigError
from areal_sc.records.metrics import PASS_AT, EvaluationResult
from areal_sc.rewards.base import PART_PREFIX
from areal_sc.trainer.run import Run

_COMPARED: Final = ("periodic", "after")
"""Evaluations of which models are written. The model before training is not one of the run's."""

_LOWER_IS_BETTER: Final = ("loss",)

_MAJORITY: Final = "majority"
"""A number that an evaluation does not have where no answer had a vote."""

_USUAL: Final = ("reward", "accuracy", _MAJORITY)
"""Numbers of each set, beside `pass@K`."""


class BestModel:
    """Keeps the best model, where `checkpoint.keep_best` names a number.

    Args:
        num_samples: answers a prompt of each set, by its name.

    Attributes:
        results: those that are compared, in their order.
    Raises: ConfigError: the number is of a set that is not there, or of more answers than it has.
    """

    def __init__(self, run: Run, num_samples: dict[str, int]) -> None:
        self._run = run
        self._number = run.config.checkpoint.keep_best
        self._set, self._metric = _split(self._number, num_samples)
        self.results: list[EvaluationResult] = []
        self._is_known = self._metric == _MAJORITY  # an evaluation had it, or may have it
        if self._number and num_samples:
            _check(self._number, self._set, self._metric, num_samples)

    @property
    def best(self) -> EvaluationResult | None:
        """The best result that has the number; the first one of equals."""
        numbered = (it for it in self.results if it.value(self._metric) is not None)
        return max(numbered, key=self._score, default=None)

    @property
    def has_enough(self) -> bool:
        """Whether `evaluation.stop_after` evaluations have come since the best one."""
        limit, best = self._run.config.evaluation.stop_after, self.best
        return bool(limit and best and len(self.results) - self.results.index(best) > limit)

    def begin(self) -> None:
        """An evaluation of the present step begins, so its model may be the best."""
        if self._number and self._run.checkpoints is not None:
            self._run.checkpoints.export()

    def remember(self, results: Iterable[EvaluationResult], last_step: int | None = None) -> None:
        """These results, and no others, are those of the run.

        Args:
            last_step: later ones are none of them, and there is no model of theirs; None: all are.
        """
        results = list(results)
        self._is_known |= any(map(self._has_number, results))
        self.results = [
            it
            for it in results
            if self._is_compared(it) and (last_step is None or it.step <= last_step)
        ]
        models = self._models
        if self._number and last_step is not None and (_step_of_best(models) or 0) > last_step:
            (models / "best").unlink()

    def note_results(self, results: Iterable[EvaluationResult]) -> None:
        """Takes new results into account.

        Raises: ConfigError: no evaluation so far has the number.
        """
        for result in results:
            if not self._is_of_kind(result, "before", *_COMPARED):
                continue  # a greedy one has a single answer a prompt
            self._is_known |= self._has_number(result)
            if not self._is_known:
                numbers = ["reward", *result.workflow, *(f"{PASS_AT}{k}" for k in result.pass_at)]
                known = ", ".join(numbers)
                raise ConfigError(
                    f"checkpoint.keep_best={self._number}: the evaluation has no such number; it "
                    f"has {known}"
                )
            if not self._is_compared(result):
                continue
            before, is_enough = self.best, self.has_enough
            # a start that was killed while it told the results of sets may have told this one
            self.results = [it for it in self.results if it.step != result.step] + [result]
            if self.best is not before:
                value = result.value(self._metric)
                self._run.log.event("best", step=result.step, number=self._number, value=value)
            if self.has_enough and not is_enough and before is not None:
                self._run.display.note(
                    f"{self._run.config.evaluation.stop_after} evaluations had no better "
                    f"{self._number} than {before.value(self._metric):.4g} of step "
                    f"{before.step}: training ends"
                )

    def settle(self) -> None:
        """Has `models/best` lead to the best model, once it is written; deletes worse ones."""
        best, checkpoints = self.best, self._run.checkpoints
        if not self._number or best is None or checkpoints is None:
            return
        models, every_steps = self._models, self._run.config.checkpoint.export_every_steps
        if checkpoints.has_model(best.step) and _step_of_best(models) != best.step:
            link = models / ".best"
            link.unlink(missing_ok=True)
            link.symlink_to(f"step-{best.step}")
            os.replace(link, models / "best")
        if _step_of_best(models) != best.step:
            return
        worse = {it.step for it in self.results} - {best.step}
        if not (written := [it for it in worse if checkpoints.has_model(it)]):
            return
        safe = self._best_of_newest_snapshot()
        for step in written:
            is_wanted = every_steps and step % every_steps == 0
            if not is_wanted and step != safe:
                shutil.rmtree(models / f"step-{step}", ignore_errors=True)

    def finish(self) -> None:
        """Waits until the best model is written, and says where it is."""
        if (best := self.best) is None or self._run.checkpoints is None:
            return
        self._run.checkpoints.collect()
        self.settle()
        what = f"best model: step {best.step} ({self._number} {best.value(self._metric):.4g})"
        if (there := _step_of_best(self._models)) == best.step:
            self._run.display.note(f"{what}, in models/best")
            return
        leads = "there is no models/best" if there is None else f"models/best is of step {there}"
        self._run.display.warning(
            f"{what}, but its model is not there any more, or was not written: {leads}"
        )

    @property
    def _models(self) -> Path:
        return self._run.folder.path / "models"

    def _best_of_newest_snapshot(self) -> int | None:
        """Step of the best model, were the run to go on from the newest snapshot."""
        if not (snapshots := self._run.folder.snapshots()):
            return None
        newest = int(snapshots[-1].name.rpartition("-")[2])
        before = [it for it in self.results if it.step <= newest]
        best = max(before, key=self._score, default=None)
        return None if best is None else best.step

    def _has_number(self, result: EvaluationResult) -> bool:
        is_ours = self._is_of_kind(result, "before", *_COMPARED)
        return is_ours and result.value(self._metric) is not None

    def _is_compared(self, result: EvaluationResult) -> bool:
        return self._is_of_kind(result, *_COMPARED)

    def _is_of_kind(self, result: EvaluationResult, *kinds: str) -> bool:
        """Whether it is one of the set that decides."""
        its_set, _, kind = result.name.rpartition("/")
        return bool(self._number) and its_set == self._set and kind in kinds

    def _score(self, result: EvaluationResult) -> float:
        value = result.value(self._metric)
        if value is None or math.isnan(value):
            return -math.inf
        return -value if self._metric in _LOWER_IS_BETTER else float(value)


def _split(number: str, num_samples: Mapping[str, int]) -> tuple[str, str]:
    """The set, "" where it is that of all, and the metric, whose name may have a `/`, too."""
    its_set, _, metric = number.partition("/")
    return (its_set, metric) if metric and its_set in num_samples else ("", number)


def _check(number: str, its_set: str, metric: str, num_samples: dict[str, int]) -> None:
    where = f"checkpoint.keep_best={number}"
    other, _, usual = metric.rpartition("/")
    is_usual = usual in _USUAL or usual.startswith(PASS_AT)
    if other and is_usual and not metric.startswith(PART_PREFIX):
        names = ", ".join(filter(None, num_samples)) or "one without a name"
        raise ConfigError(f"{where}: there is no evaluation set {other!r}; there is {names}")
    most = num_samples[its_set] if its_set else min(num_samples.values())
    known = [f"{PASS_AT}{2**it}" for it in range(most.bit_length())] if most > 1 else []
    if metric.startswith(PASS_AT) and metric not in known:
        raise ConfigError(
            f"{where}: expected {' or '.join(known) or 'another number'}, since each prompt has "
            f"{most} answers (num_samples)"
        )


def _step_of_best(models: os.PathLike[str]) -> int | None:
    try:
        return int(os.readlink(os.path.join(models, "best")).rpartition("-")[2])
    except (OSError, ValueError):
        return None
