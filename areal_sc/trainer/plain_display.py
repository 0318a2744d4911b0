"""The display for files and pipes: one `key=value` line an event, without control codes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.text import Text

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary

_REPORTS_PER_PHASE = 4
"""Lines about the progress of one phase, beside those of its start and end."""


class PlainPhase:
    """Progress of one phase; reports each quarter of it."""

    def __init__(self, display: PlainDisplay, name: str, total: int | None, unit: str) -> None:
        self.done = 0
        self._display = display
        self._name = name
        self._total = total
        self._unit = unit
        self._reports = 0

    def advance(self, n: int = 1) -> None:
        self.done += n
        if self._total:
            reports = _REPORTS_PER_PHASE * self.done // self._total
            if self._reports < reports < _REPORTS_PER_PHASE:
                self._reports = reports
                self._display.line("INFO", phase=self._name, done=self.progress)

    def update(self, text: str) -> None:
        self._display.line("INFO", phase=self._name, status=text)

    @property
    def progress(self) -> str:
        total = "" if self._total is None else f"/{self._total}"
        return f"{self.done}{total} {self._unit}".strip()


class PlainDisplay:
    """Writes to the console's file, past rich: lines are never wrapped, coloured or cut."""

    def __init__(
        self, console: Console, *, run_dir: Path | None = None, total_steps: int | None = None
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        if run_dir is not None:
            self.line("INFO", run_dir=run_dir, total_steps=total_steps)

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[PlainPhase]:
        phase = PlainPhase(self, name, total, unit)
        started_at = self._console.get_time()
        self.line("INFO", phase=name, begins=phase.progress)
        outcome = "stopped"
        try:
            yield phase
            outcome = "ended"
        finally:
            duration_s = round(self._console.get_time() - started_at, 2)
            self.line(
                "INFO", phase=name, **{outcome: phase.progress}, duration_s=f"{duration_s:.2f}"
            )

    def step(self, metrics: StepMetrics) -> None:
        total = "" if self._total_steps is None else f"/{self._total_steps}"
        self.line(
            "INFO",
            step=f"{metrics.step}{total}",
            reward=metrics.reward,
            accuracy=metrics.accuracy,
            token_staleness_mean=metrics.token_staleness_mean,
            token_staleness_max=metrics.token_staleness_max,
            group_staleness_mean=metrics.group_staleness_mean,
            group_staleness_max=metrics.group_staleness_max,
            generated_tokens_per_s=round(metrics.generated_tokens_per_s),
            trained_tokens_per_s=round(metrics.trained_tokens_per_s),
            step_time_s=metrics.step_time_s,
            bound=metrics.bound,
            masked_share=metrics.masked_share or None,
            wasted_share=metrics.wasted_share or None,
            rejected_groups=metrics.num_rejected_groups or None,
        )

    def evaluation(self, result: EvaluationResult) -> None:
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

    def finish(self, summary: Summary, run_dir: Path) -> None:
        values = {item.name: getattr(summary, item.name) for item in fields(summary)}
        self.line("INFO", finished=run_dir, **values)

    def close(self) -> None:
        self._console.file.flush()

    def line(self, level: str, **values: Any) -> None:
        """Writes one line; values that are None are left out."""
        self._console.file.write(f"{level} {_key_values(values, self._console.encoding)}\n")
        self._console.file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _key_values(values: Mapping[str, Any], encoding: str) -> str:
    pairs = (f"{key}={_word(value)}" for key, value in values.items() if value is not None)
    return " ".join(pairs).encode(encoding, "backslashreplace").decode(encoding)


def _word(value: Any) -> str:
    """A value as one word, or quoted as in JSON where it would not be one."""
    if isinstance(value, float):
        return f"{value:.4g}"
    text = Text.from_ansi(str(value)).plain
    if not text or any(character in '"= ' or not character.isprintable() for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text
