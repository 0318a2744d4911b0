"""The display for terminals: lines scroll by above the bars of what is going on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.trainer.plain_display import Phase
from areal_sc.trainer.quantities import percent, short_count, short_duration, short_number
from areal_sc.trainer.step_table import StepTable
from areal_sc.trainer.tracker import Tracker

_REFRESHES_PER_S = 4
_ROWS_PER_HEADER = 20
_BAR_WIDTH = 20
_SPEED_WINDOW_S = 3600.0
"""The remaining time is told from the speed of so long; one step may take many minutes."""

_RUN_FILES = (
    *("summary.json", "metrics.jsonl", "learning_curve.png", "config.yaml"),
    *("model", "models", "checkpoints", "logs"),
)


class LivePhase(Phase):
    """Shows its progress in one bar."""

    def __init__(self, bars: Progress, task: TaskID, *attributes: Any) -> None:
        super().__init__(*attributes)
        self._bars = bars
        self._task = task

    def advance(self, n: int = 1) -> None:
        super().advance(n)
        self._bars.update(self._task, completed=self.done)

    def update(self, text: str) -> None:
        super().update(text)
        line = " ".join(Text.from_ansi(text).plain.split())
        self._bars.update(self._task, status=line, refresh=True)


class LiveDisplay(Tracker):
    """Bars at the bottom while a phase is open, everything else scrolling above them."""

    def __init__(self, console: Console, run_dir: Path | None, total_steps: int | None) -> None:
        self._console = console
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._table: StepTable | None = None
        self._rows_since_header = 0
        rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.fields[status]}", style="dim", markup=False, table_column=rest),
            console=console,
            get_time=console.get_time,
            speed_estimate_period=_SPEED_WINDOW_S,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            expand=True,
        )
        if run_dir is not None:
            self._print(Text.assemble(("areal_sc ", "bold"), str(run_dir)))

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        task = self._bars.add_task(name, total=total, status="")
        phase = LivePhase(self._bars, task, name, total, unit, self._console.get_time())
        self._bars.start()
        outcome = "stopped"
        try:
            yield phase
            outcome = ""
        finally:
            self._bars.remove_task(task)
            if not self._bars.tasks:
                self._bars.stop()
            duration = short_duration(self._console.get_time() - phase.started_at)
            if outcome:
                done = f"{outcome} after {phase.progress} {unit}".rstrip()
            else:
                done = f"{phase.done} {unit}".rstrip() if phase.done else "done"
            self._print(Text(f"{name}: {done} in {duration}"))

    def on_step(self, metrics: StepMetrics) -> None:
        if self._table is None or self._table.width != self._console.width:
            self._table = StepTable(self._console.width, self._total_steps)
            self._rows_since_header = _ROWS_PER_HEADER
        if self._rows_since_header >= _ROWS_PER_HEADER:
            self._rows_since_header = 0
            for line in self._table.header():
                self._print(line)
        self._rows_since_header += 1
        self._print(self._table.row(metrics))

    def on_evaluation(self, result: EvaluationResult) -> None:
        line = Text.assemble((f"evaluation {result.name}: ", "bold magenta"))
        if result.accuracy is not None:
            line.append(f"accuracy {short_number(result.accuracy)}, ")
        if result.accuracy != result.reward:
            line.append(f"reward {short_number(result.reward)}, ")
        line.append(f"{result.num_prompts} prompts")
        versions = f"version {result.version_min}"
        if result.version_max != result.version_min:
            versions += f" to {result.version_max}"
        line.append(f", {versions}", style="dim")
        self._print(line)

    def note(self, text: str) -> None:
        self._print(Text.from_ansi(text))

    def warning(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), Text.from_ansi(text).plain))

    def on_finish(self, summary: Summary) -> None:
        self.close()
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", no_wrap=True)
        grid.add_column()
        for label, text in _result_lines(summary):
            grid.add_row(label, text)
        self._console.print()
        self._console.print(grid)
        if self._run_dir is not None:
            self._print(Text.assemble(("run folder  ", "bold"), str(self._run_dir)))
            found = [path for name in _RUN_FILES if (path := self._run_dir / name).exists()]
            names = [f"{path.name}/" if path.is_dir() else path.name for path in found]
            self._console.print(Padding(Text("  ".join(names)), (0, 0, 0, 2)))

    def close(self) -> None:
        self._bars.stop()

    def _print(self, line: Text) -> None:
        self._console.print(line, highlight=False)


def _result_lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Label and text of each line of the result; what was not measured is left out."""
    accuracy = (summary.accuracy_before, summary.accuracy_after)
    reward = (summary.reward_before, summary.reward_after)
    for label, (before, after) in (("accuracy", accuracy), ("reward", reward)):
        if after is not None and (label == "accuracy" or reward != accuracy):
            text = short_number(after)
            if before is not None:
                text = f"{short_number(before)} before, {text} after"
            if label == "accuracy" and summary.greedy_accuracy_after is not None:
                text += f", {short_number(summary.greedy_accuracy_after)} greedy"
            yield label, text
    steps = f"{summary.num_steps} in {short_duration(summary.wall_time_s)}"
    if summary.first_step_s is not None:
        steps += f", the first after {short_duration(summary.first_step_s)}"
    yield "steps", steps
    if summary.generated_tokens_per_s is not None:
        yield (
            "tokens/s",
            f"{short_count(summary.generated_tokens_per_s)} generated, "
            f"{short_count(summary.trained_tokens_per_s)} trained",
        )
    if summary.wait_share is not None:
        yield (
            "time",
            f"{percent(summary.wait_share)} waiting for generation, "
            f"{percent(summary.train_share or 0)} training, "
            f"{percent(summary.sync_share or 0)} publishing",
        )
    if summary.max_token_staleness_trained is not None:
        yield (
            "staleness",
            f"at most {summary.max_token_staleness_trained} of tokens, "
            f"{summary.max_group_staleness} of groups",
        )
    if summary.num_rows_trained is not None:
        rows = f"{summary.num_rows_trained:,} trained"
        if summary.num_rows_trained_twice is not None:
            rows += f", {summary.num_rows_trained_twice:,} twice"
        if summary.num_rows_rejected is not None:
            rows += f", {summary.num_rows_rejected:,} rejected"
        yield "rows", rows
    lost = []
    if summary.num_masked_tokens:
        lost.append(f"{summary.num_masked_tokens:,} masked")
    if summary.num_wasted_tokens:
        lost.append(f"{summary.num_wasted_tokens:,} wasted")
    if lost:
        yield "tokens", ", ".join(lost)
    if summary.controller_bytes_per_row is not None:
        yield "controllers", f"{summary.controller_bytes_per_row:.0f} bytes a row"
