"""What a run shows while it works: a live display on a terminal, plain lines elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from areal_sc.quantities import percent, short_duration, short_number
from areal_sc.records.metrics import EvaluationResult, StepMetrics, Summary
from areal_sc.records.trackers.base import Tracker
from areal_sc.rejection import describe_counts
from areal_sc.system.telling import Outlet
from areal_sc.trainer.step_table import StepTable, columns_of, named_values

_REPORTS_PER_PHASE = 4
"""Plain lines about the progress of one phase, beside those of its start and end."""

_REFRESHES_PER_S = 4
_ROWS_PER_HEADER = 20
_BAR_WIDTH = 20
_LEFT_FILES = ("model", "learning_curve.png", "summary.json", "metrics.jsonl", "models", "logs")
"""What a run leaves that a user looks for."""

_SPEED_WINDOW_S = 3600.0
"""The remaining time follows from the speed within this time: one step may take many minutes."""


@dataclass
class ShownPhase:
    """A part of the run whose progress is shown.

    Attributes:
        total: number of units to do; None where it is not known.
        unit: what is counted, in the plural: `steps`.
        since: Unix time of its begin.
    """

    name: str
    total: int | None
    unit: str
    display: Display
    done: int = 0
    since: float = field(default_factory=time.time)
    bar: Any = None  # of a live display

    def advance(self, n: int = 1) -> None:
        """Counts `n` more of the phase's units as done."""
        self.done += n
        self.display.on_phases(self.display.open_phases)
        self.display.show_progress(self, n)

    @property
    def progress(self) -> str:
        done = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f"{done} {self.unit}".strip()


class Display(Tracker):
    """A tracker that shows what it is told, and phases, notes and warnings.

    `on_phases` is told whenever a phase begins, goes on or ends, of all that are open.

    This one is for files and pipes: one `key=value` line an event, without control codes. Lines are
    written past rich: they are never wrapped, coloured or cut.
    """

    def __init__(self, console: Console, run_dir: Path | None, total_steps: int | None) -> None:
        self._console = console
        self._run_dir = run_dir
        self._total_steps = total_steps
        self._outages: Sequence[str] = ()
        self.open_phases: list[ShownPhase] = []
        self.on_phases: Callable[[Sequence[ShownPhase]], None] = lambda phases: None
        if run_dir is not None:
            self.show_folder(run_dir)

    @contextmanager
    def phase(
        self, name: str, total: int | None = None, unit: str = "", done: int = 0
    ) -> Iterator[ShownPhase]:
        """Shows progress while it is open; phases may be nested. `done` is so already."""
        phase = ShownPhase(name, total, unit, self, done)
        began = self._console.get_time()
        self.open_phases.append(phase)
        self.on_phases(self.open_phases)
        self.begin_phase(phase)
        outcome = "stopped"
        try:
            yield phase
            outcome = "ended"
        finally:
            self.open_phases.remove(phase)
            self.on_phases(self.open_phases)
            self.end_phase(phase, outcome, self._console.get_time() - began)

    def show_folder(self, run_dir: Path) -> None:
        self._line(run_dir=run_dir, total_steps=self._total_steps)

    def begin_phase(self, phase: ShownPhase) -> None:
        self._line(phase=phase.name, begins=phase.progress)

    def end_phase(self, phase: ShownPhase, outcome: str, duration_s: float) -> None:
        """Args: outcome: `ended`, or `stopped` by an exception."""
        ended = {"phase": phase.name, outcome: phase.progress}
        self._line(**ended, duration_s=f"{duration_s:.2f}")

    def show_progress(self, phase: ShownPhase, num_new: int) -> None:
        if phase.total:
            before, now = (
                _REPORTS_PER_PHASE * done // phase.total
                for done in (phase.done - num_new, phase.done)
            )
            if before < now < _REPORTS_PER_PHASE:
                self._line(phase=phase.name, done=phase.progress)

    def on_step(self, metrics: StepMetrics) -> None:
        values = dict(named_values(metrics))
        if self._total_steps is not None:
            values["step"] = f"{metrics.step}/{self._total_steps}"
        self._line(**values)

    def on_evaluation(self, result: EvaluationResult) -> None:
        self._line(evaluation=result.name, step=result.step, **_told(result))

    def note(self, text: str) -> None:
        """Shows something worth knowing."""
        self._line(note=text)

    def warning(self, text: str) -> None:
        """Shows that something is worse than it should be; the run goes on."""
        self._line("WARNING", warning=text)

    def show_pause(self, text: str) -> None:
        """Shows that the run is paused, until the next call; "": it goes on."""
        self.note(text or "the pause is over: the run goes on")

    def show_outages(self, outages: Sequence[str]) -> None:
        """Shows what is being repaired now; nothing, when all is well again."""
        for outage in outages:
            if outage not in self._outages:
                self.warning(outage)
        self._outages = outages

    def on_finish(self, summary: Summary) -> None:
        self._line(finished=self._run_dir, **asdict(summary))

    def close(self) -> None:
        """Gives the terminal back; a second call does nothing."""
        self._console.file.flush()

    def _line(self, level: str = "INFO", **values: Any) -> None:
        """Writes one line; values that are None are left out."""
        pairs = (f"{key}={_word(value)}" for key, value in values.items() if value is not None)
        encoding = self._console.encoding
        line = " ".join([level, *pairs]).encode(encoding, "backslashreplace").decode(encoding)
        self._console.file.write(f"{line}\n")
        self._console.file.flush()


def _told(result: EvaluationResult) -> dict[str, Any]:
    """What a line tells of an evaluation, by name; None: nothing."""
    names = ("accuracy", "reward", "num_prompts", "temperature", "version_min", "version_max")
    values = {name: getattr(result, name) for name in names} | result.reward_parts()
    if result.accuracy_low is not None and result.accuracy_high is not None:
        bounds = result.accuracy_low, result.accuracy_high
        values["interval"] = " to ".join(map(short_number, bounds))
    values |= {f"pass@{k}": value for k, value in result.pass_at.items() if k != "1"}
    values |= {"majority": result.majority}
    values |= {"rejected": result.num_rejected or None, "cut": result.num_cut or None}
    if math.isnan(result.temperature):  # sets have different ones
        del values["temperature"]
    if "loss" in result.workflow:  # of rows, which have no rewards
        values = {"loss": result.workflow["loss"], **values, "reward": None}
    return values


def _word(value: Any) -> str:
    """A value as one word, or quoted as in JSON where it would not be one."""
    if isinstance(value, Mapping):
        value = _entries(value)
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    if isinstance(value, int):
        return str(value)
    text = Text.from_ansi(str(value)).plain
    if not text or any(character in '"= ' or not character.isprintable() for character in text):
        return json.dumps(text, ensure_ascii=False)
    return text


class _Bars(Progress):
    """Progress bars, and what is shown below them: a pause, then what is wrong now."""

    pause: RenderableType | None = None
    wrong: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield from (part for part in (self.pause, self.wrong) if part is not None)


class LiveDisplay(Display):
    """For terminals: bars at the bottom while a phase is open; all else scrolls above them."""

    def __init__(self, console: Console, run_dir: Path | None, total_steps: int | None) -> None:
        super().__init__(console, run_dir, total_steps)
        self._table: StepTable | None = None
        self._rows_since_header = 0
        self._bars = _Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=console,
            get_time=console.get_time,
            speed_estimate_period=_SPEED_WINDOW_S,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
        )

    def show_folder(self, run_dir: Path) -> None:
        self._print(Text.assemble(("areal_sc ", "bold"), str(run_dir)))

    def begin_phase(self, phase: ShownPhase) -> None:
        phase.bar = self._bars.add_task(phase.name, total=phase.total, completed=phase.done)
        self._bars.start()

    def end_phase(self, phase: ShownPhase, outcome: str, duration_s: float) -> None:
        self._bars.remove_task(phase.bar)
        if not self._bars.tasks:
            self._bars.stop()
        if outcome == "stopped":
            done = f"stopped after {phase.progress}"
        else:
            done = f"{phase.done} {phase.unit}".rstrip() if phase.done else "done"
        self._print(Text(f"{phase.name}: {done} in {short_duration(duration_s)}"))

    def show_progress(self, phase: ShownPhase, num_new: int) -> None:
        self._bars.update(phase.bar, completed=phase.done)

    def on_step(self, metrics: StepMetrics) -> None:
        if self._table is None or self._table.width != self._console.width:
            columns = columns_of(metrics)
            self._table = StepTable(self._console.width, self._total_steps, columns)
            self._rows_since_header = _ROWS_PER_HEADER
        if self._rows_since_header >= _ROWS_PER_HEADER:
            self._rows_since_header = 0
            self._print(self._table.header())
        self._rows_since_header += 1
        for line in self._table.rows(metrics):
            self._print(line)

    def on_evaluation(self, result: EvaluationResult) -> None:
        line = Text.assemble((f"evaluation {result.name}: ", "bold magenta"))
        told = ((name, value) for name, value in _told(result).items() if value is not None)
        line.append(", ".join(f"{name} {_word(value)}" for name, value in told))
        self._print(line)

    def note(self, text: str) -> None:
        self._print(Text.from_ansi(text))

    def warning(self, text: str) -> None:
        self._print(Text.assemble(("warning: ", "bold yellow"), Text.from_ansi(text).plain))

    def show_pause(self, text: str) -> None:
        """Below the bars, as long as it goes on; and as a note."""
        super().show_pause(text)
        self._bars.pause = Text(text, style="yellow") if text else None

    def show_outages(self, outages: Sequence[str]) -> None:
        """Below the bars, as long as they go on."""
        lines = [Text(outage, style="yellow") for outage in outages]
        self._bars.wrong = Group(*lines) if lines else None

    def on_finish(self, summary: Summary) -> None:
        self.close()
        self._console.print()
        self._console.print(summary_table(summary))
        if self._run_dir is not None:
            self._print(Text.assemble(("run folder  ", "bold"), str(self._run_dir)))
            left = [name for name in _LEFT_FILES if (self._run_dir / name).exists()]
            if left:
                self._print(Text.assemble(("in it       ", "bold"), ", ".join(left)))

    def close(self) -> None:
        self._bars.stop()

    def _print(self, line: Text) -> None:
        self._console.print(line, highlight=False)


def summary_table(summary: Summary) -> Table:
    """What was measured of a run, a line each."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    for name, value in asdict(summary).items():
        if value is not None and value != {}:
            grid.add_row(name, Text(_shown(name, value)))
    return grid


def _entries(values: Mapping[str, Any]) -> str:
    """Counts by cause, or numbers by name, also several of each."""
    if all(isinstance(value, int) for value in values.values()):
        return describe_counts(values)
    entries = (
        f"({_entries(value)})" if isinstance(value, Mapping) else short_number(value)
        for value in values.values()
    )
    return ", ".join(map(" ".join, zip(values, entries, strict=True)))


def _shown(name: str, value: Any) -> str:
    """A number of the summary, in the unit that its name tells; or numbers by cause."""
    if isinstance(value, Mapping):
        return _entries(value)
    if name.endswith("_share"):
        return percent(value)
    if name.endswith("_s") and not name.endswith("_per_s"):
        return short_duration(value)
    return f"{value:,}" if isinstance(value, int) else short_number(value)


def make_display(
    console: Console | None = None,
    *,
    run_dir: Path | None = None,
    total_steps: int | None = None,
) -> Display:
    """The display that fits the output.

    Args:
        console: where to show it; None is standard output, live only where that is a terminal
            that can move its cursor (`TERM=dumb` cannot).
    """
    if console is None:
        # given explicitly, because FORCE_COLOR would make rich take a pipe for a terminal
        stdout = Outlet.of(sys.stdout)
        console = Console(file=stdout, force_terminal=stdout.isatty())
    is_live = console.is_terminal and not console.is_dumb_terminal
    return (LiveDisplay if is_live else Display)(console, run_dir, total_steps)
