"""The file `metrics.jsonl`: what is measured of a run is appended, and read again."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from areal_sc.errors import RunFolderError
from areal_sc.records.metrics import EvaluationResult, StepMetrics
from areal_sc.records.trackers.base import Tracker
from areal_sc.system.json_lines import JsonLines, read_json_lines


class MetricsLog(Tracker):
    """Appends records to `metrics.jsonl`.

    Every record has `kind` (`step`, `evaluation` or `event`) and `time` (Unix time, seconds).
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises: RunFolderError: the file cannot be opened."""
        self._lines = JsonLines(path)
        self._clock = clock

    def on_step(self, metrics: StepMetrics) -> None:
        self._append("step", metrics.to_record())

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._append("evaluation", result.to_record())

    def event(self, name: str, **values: Any) -> None:
        """Something else worth keeping: resumed, went_back, snapshot, workers_restarted, ..."""
        self._append("event", {"name": name, **values})

    def close(self) -> None:
        self._lines.close()

    def _append(self, kind: str, values: dict[str, Any]) -> None:
        self._lines.append({"kind": kind, "time": round(self._clock(), 3), **values})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order; an unfinished last line is left out.

    Raises: RunFolderError: the file cannot be read, or a line before the last is no JSON object.
    """
    return read_json_lines(path, dict[str, Any])


@dataclass
class History:
    """A run's steps and evaluations, without those that it has gone back behind.

    Attributes:
        num_worker_restarts: of workers that were lost, in all of its starts.
    """

    steps: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationResult] = field(default_factory=list)
    num_worker_restarts: int = 0

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises: RunFolderError: see `read_metrics`; or a record lacks something."""
        history = cls()
        for number, record in enumerate(read_metrics(path), start=1):
            try:
                history.add(record)
            except (KeyError, TypeError) as error:
                raise RunFolderError(
                    f"{path}, line {number}: expected a record of a run's metrics, but {error}; "
                    "delete the line, or move the file away"
                ) from error
        return history

    def add(self, record: Mapping[str, Any]) -> None:
        """Goes on by the next record of the file.

        Raises: KeyError, TypeError: it lacks something; the history is as before.
        """
        match record["kind"]:
            case "step":
                self.steps.append(StepMetrics.from_record(record))
            case "evaluation":
                self.evaluations.append(EvaluationResult.from_record(record))
            case "event" if record["name"] in ("resumed", "went_back"):
                last = record["step"]
                self.steps = [earlier for earlier in self.steps if earlier.step <= last]
                self.evaluations = [one for one in self.evaluations if one.step <= last]
            case "event" if record["name"] == "workers_restarted":
                self.num_worker_restarts += len(record["workers"])
