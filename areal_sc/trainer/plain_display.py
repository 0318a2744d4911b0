"""The display for files and pipes: one `key=value` line an event, without control codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.trainer.step_table import named_values
from areal_sc.trainer.trackers.base import Tracker

_REPORTS_PER_PHASE = 4
"""Lines about the progress of one phase, beside those of its start and end."""


@dataclass
class Phase:
    """A part of the run whose progress is shown.

    Attributes:
        name: e.g. `start-up`, `warm start`, `training`.
        total: number of units to do; None where it is not known.
        unit: what is counted, in the plural: `steps`.
        started_at: in seconds of the console's clock.
        done: units done.
    """

    name: str
    total: int | None
    unit: str
    started_at: float
    done: int = 0

    def advance(self, n: int = 1) -> None:
        """Counts `n` more of the phase's units as done."""
        self.done += n

    def update(self, text: str) -> None:
        """Says what the phase is doing now."""

    @property
    def progress(self) -> str:
        return f"{self.done}" if self.total is None else f"{self.done}/{self.total}"


class PlainPhase(Phase):
    """Reports each quarter of a phase."""

    def __init__(self, display: PlainDisplay, *attributes: Any) -> None:
        super().__init__(*attributes)
        self._display = display
        self._quarter = 0

    def advance(self, n: int = 1) -> None:
        super().advance(n)
        if self.total:
            quarter = _REPORTS_PER_PHASE * self.done // self.total
            if self._quarter < quarter < _REPORTS_PER_PHASE:
                self._quarter = quarter
                self._display.line("INFO", phase=self.name, done=self.counted)

    def update(self, text: str) -> None:
        self._display.line("INFO", phase=self.name, status=text)

    @property
    def counted(self) -> str:
        return f"{self.progress} {self.unit}".strip()


class PlainDisplay(Tracker):
    """Writes to the console's file, past rich: lines are never wrapped, coloured or cut."""

    def __init__(self, console: Console, run_dir: Path | None, total_steps: int | None) -> None:
        self._console = console
        self._run_dir = run_dir
        self._total_steps = total_steps
        if run_dir is not None:
            self.line("INFO", run_dir=run_dir, total_steps=total_steps)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        phase = PlainPhase(self, name, total, unit, self._console.get_time())
        self.line("INFO", phase=name, begins=phase.counted)
        outcome = "stopped"
        try:
            yield phase
            outcome = "ended"
        finally:
            duration_s = self._console.get_time() - phase.started_at
            self.line(
                "INFO", phase=name, **{outcome: phase.counted}, duration_s=f"{duration_s:.2f}"
            )

    def on_step(self, metrics: StepMetrics) -> None:
        values = dict(named_values(metrics))
        if self._total_steps is not None:
            values["step"] = f"{metrics.step}/{self._total_steps}"
        self.line("INFO", **values)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self.line(
            "INFO",
            evaluation=result.name,
            step=result.step,
            accuracy=result.accuracy,
            reward=result.reward,
            prompts=result.num_prompts,
            temperature=result.temperature,
            version_min=result.version_min,
            version_max=result.version_max,
        )

    def note(self, text: str) -> None:
        self.line("INFO", note=text)

    def warning(self, text: str) -> None:
        self.line("WARNING", warning=text)

    def on_finish(self, summary: Summary) -> None:
        self.line("INFO", finished=self._run_dir, **asdict(summary))

    def close(self) -> None:
        self._console.file.flush()

    def line(self, level: str, **values: Any) -> None:
        """Writes one line; values that are None are left out."""
        self._console.file.write(f"{level} {_key_values(values, self._console.encoding)}\n")
        self._console.file.flush()


def _key_values(values: Mapping[str, Any], encoding: str) -> str:
    pairs = (f"{key}={_word(value)}" for key, value in values.items() if value is not None)
    return " ".join(pairs).encode(encoding, "backslashreplace").decode(encoding)


def _word(value: Any) -> str:
    """A value as one word, or quoted as in JSON where it would not be one."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    text = Text.from_ansi(str(value)).plain
    if not text or any(character in '"= ' or not character.isprintable() for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text
