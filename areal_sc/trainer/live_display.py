"""The display for terminals: lines scroll by above the bars of what is going on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from areal_sc.trainer.trackers.base import Tracker

_REFRESHES_PER_S = 4
_ROWS_PER_HEADER = 20
_BAR_WIDTH = 20
_SPEED_WINDOW_S = 3600.0
"""The remaining time is told from the speed of so long; one step may take many minutes."""

_RUN_FILES = (
    *("summary.json", "metrics.jsonl", "learning_curve.png", "config.yaml"),
    *("model", "models", "checkpoints", "logs"),
)


_RESULT: dict[str, tuple[tuple[str, Callable[[Any], str], str], ...]] = {
    "accuracy": (
        ("accuracy_before", short_number, "before"),
        ("accuracy_after", short_number, "after"),
        ("greedy_accuracy_after", short_number, "greedy"),
    ),
    "reward": (("reward_before", short_number, "before"), ("reward_after", short_number, "after")),
    "steps": (
        ("num_steps", str, "done"),
        ("wall_time_s", short_duration, "in all"),
        ("first_step_s", short_duration, "until the first"),
    ),
    "tokens/s": (
        ("generated_tokens_per_s", short_count, "generated"),
        ("trained_tokens_per_s", short_count, "trained"),
    ),
    "time": (
        ("wait_share", percent, "waiting for generation"),
        ("train_share", percent, "training"),
        ("sync_share", percent, "publishing"),
    ),
    "staleness": (
        ("max_token_staleness_trained", str, "of tokens"),
        ("max_group_staleness", str, "of groups, at most"),
    ),
    "rows": (
        ("num_rows_trained", "{:,}".format, "trained"),
        ("num_rows_trained_twice", "{:,}".format, "twice"),
        ("num_episodes_rejected", "{:,}".format, "episodes rejected"),
    ),
    "tokens": (
        ("num_masked_tokens", "{:,}".format, "masked"),
        ("num_wasted_tokens", "{:,}".format, "wasted"),
    ),
    "controllers": (("controller_bytes_per_row", "{:.0f}".format, "bytes a row"),),
}
"""Lines of a run's result: label, and of each part its name, how to show it, and what it is."""


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
    is_same = summary.reward_after == summary.accuracy_after
    for label, parts in _RESULT.items():
        if label == "reward" and is_same:
            continue
        found = [(getattr(summary, name), show, what) for name, show, what in parts]
        texts = [f"{show(value)} {what}" for value, show, what in found if value is not None]
        if texts:
            yield label, ", ".join(texts)
