"""The display for terminals: lines scroll by above the bars of what is going on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from areal_sc.trainer.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.trainer.plain_display import Phase
from areal_sc.trainer.quantities import percent, short_count, short_duration, short_number
from areal_sc.trainer.step_table import StepTable
from areal_sc.trainer.tracker import Tracker

_REFRESHES_PER_S = 4
_ROWS_PER_HEADER = 20
_MAX_BAR_WIDTH = 40
_WIDE = 70  # characters from which a bar tells the remaining time

_RUN_FILES = (
    "summary.json",
    "metrics.jsonl",
    "learning_curve.png",
    "config.yaml",
    "model",
    "checkpoints",
    "logs",
)


class _Bars:
    """The open phases, laid out for the width that the terminal has at that moment."""

    def __init__(self, phases: list[Phase]) -> None:
        self._phases = phases

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        now = console.get_time()
        width = options.max_width
        rows = [(phase, _progress(phase, now, is_wide=width >= _WIDE)) for phase in self._phases]
        taken = max((len(phase.name) + len(texts) + 3 for phase, texts in rows), default=0)
        bar_width = max(min(width - taken, _MAX_BAR_WIDTH), 4)
        grid = Table.grid(padding=(0, 1))
        for _ in range(3):
            grid.add_column(no_wrap=True)
        for phase, texts in rows:
            bar = ProgressBar(
                total=phase.total or None,
                completed=phase.done,
                width=bar_width,
                pulse=not phase.total,
                animation_time=now,
            )
            grid.add_row(phase.name, bar, texts)
        yield grid
        for phase in self._phases:
            if phase.status:
                yield Text(
                    f"{phase.name}: {_one_line(phase.status)}",
                    style="dim",
                    no_wrap=True,
                    overflow="ellipsis",
                )


class LiveDisplay(Tracker):
    """Bars at the bottom while a phase is open, everything else scrolling above them."""

    def __init__(self, console: Console, run_dir: Path | None, total_steps: int | None) -> None:
        self._console = console
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._phases: list[Phase] = []
        self._table: StepTable | None = None
        self._rows_since_header = 0
        self._live = Live(
            console=console,
            get_renderable=lambda: _Bars(self._phases),
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )
        if run_dir is not None:
            self._print(Text.assemble(("areal_sc ", "bold"), str(run_dir)))

    @contextmanager
    def phase(self, name: str, total: int | None = None, unit: str = "") -> Iterator[Phase]:
        phase = Phase(name, total, unit, self._console.get_time())
        self._phases.append(phase)
        self._live.start(refresh=True)
        outcome = "stopped"
        try:
            yield phase
            outcome = ""
        finally:
            self._phases.remove(phase)
            if not self._phases:
                self._live.stop()
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
        self._live.stop()

    def _print(self, line: Text) -> None:
        self._console.print(line, highlight=False)


def _progress(phase: Phase, now: float, *, is_wide: bool) -> str:
    """What stands beside the bar: count, time so far, and the rest at the speed so far."""
    elapsed_s = now - phase.started_at
    texts = [short_duration(elapsed_s)]
    if phase.total or phase.done:
        texts.insert(0, phase.progress)
    if phase.total and phase.done and is_wide:
        remaining_s = elapsed_s / phase.done * max(phase.total - phase.done, 0)
        texts.append(f"{short_duration(remaining_s)} left")
    return "  ".join(texts)


def _one_line(text: str) -> str:
    return " ".join(Text.from_ansi(text).plain.split())


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
