"""The file `metrics.jsonl`: what is measured of a run is appended, and read again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, to_json
from areal_sc.trainer.trackers.base import Tracker


class MetricsLog(Tracker):
    """Appends records to `metrics.jsonl`, one JSON object a line, each written at once.

    Every record has `kind` (`step`, `evaluation` or `event`) and `time` (Unix time, seconds).
    A last line that an earlier process did not finish is cut off first.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises: RunFolderError: the file cannot be opened."""
        self.path = path
        self._clock = clock
        try:
            _cut_unfinished_line(path)
            self._file = path.open("ab", buffering=0)  # nothing left to fail when it is closed
        except OSError as error:
            raise RunFolderError(f"cannot open {path}: {error.strerror}") from error

    def on_step(self, metrics: StepMetrics) -> None:
        self._append("step", metrics.to_record())

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._append("evaluation", result.to_record())

    def event(self, name: str, **values: Any) -> None:
        """Something else worth keeping: started, resumed, snapshot, worker restarted, ..."""
        self._append("event", {"name": name, **values})

    def close(self) -> None:
        self._file.close()

    def _append(self, kind: str, values: dict[str, Any]) -> None:
        line = to_json({"kind": kind, "time": round(self._clock(), 3), **values}) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path}: {error.strerror}") from error
        if written != len(line):
            raise RunFolderError(f"cannot write {self.path}: the disk took part of a line")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All records of a metrics file, in order; an unfinished last line is left out.

    Raises: RunFolderError: the file cannot be read, or a line before the last is no JSON object.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise RunFolderError(f"cannot read {path}: {error.strerror}") from error
    records = []
    for number, line in enumerate(lines[:-1], start=1):  # after the last newline: unfinished
        try:
            records.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError as error:
            raise RunFolderError(
                f"{path}, line {number}: expected a JSON object, got {line!r}"
            ) from error
    return records


@dataclass(frozen=True)
class History:
    """A run's steps and evaluations, without those that it went back behind when it was resumed."""

    steps: Sequence[StepMetrics]
    evaluations: Sequence[EvaluationResult]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises: RunFolderError: as `read_metrics`."""
        found: list[Mapping[str, Any]] = []
        for record in read_metrics(path):
            if record["kind"] in ("step", "evaluation"):
                found.append(record)
            elif record["kind"] == "event" and record["name"] == "resumed":
                found = [earlier for earlier in found if earlier["step"] <= record["step"]]
        return cls(
            [StepMetrics.from_record(r) for r in found if r["kind"] == "step"],
            [EvaluationResult.from_record(r) for r in found if r["kind"] == "evaluation"],
        )


def _cut_unfinished_line(path: Path) -> None:
    """Shortens the file to its last newline."""
    if path.exists():
        with path.open("rb") as file:
            content = file.read(path.stat().st_size)
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)
