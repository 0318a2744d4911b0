"""Training steps as lines of aligned columns, as many as the terminal is wide."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from areal_sc.trainer.metrics import Bound, StepMetrics
from areal_sc.trainer.quantities import percent, short_count, short_duration, short_number

_NARROW = 60
"""Terminals below this width show the step's number without the total (the bar shows it)."""

_SPARE_FOR_LOSSES = 22
"""Free columns at the end of a line before the layout becomes generous."""

_SHORT_BOUND: dict[Bound, str] = {
    "generation": "gen",
    "training": "train",
    "synchronisation": "sync",
}
_BOUND_STYLE: dict[Bound, str] = {
    "generation": "cyan",
    "training": "green",
    "synchronisation": "yellow",
}


@dataclass(frozen=True, slots=True)
class _Column:
    """One column; those with the largest `rank` leave first when the terminal is narrow."""

    title: str
    heading: str  # above the titles of adjacent columns that share it
    width: int
    rank: int
    text: Callable[[StepMetrics], str]
    style: str = ""
    is_left: bool = False


class StepTable:
    """Lays out step lines for one terminal width; no line is longer than it."""

    def __init__(self, width: int, total_steps: int | None) -> None:
        """Args: width: characters a line; total_steps: None where it is not known."""
        self.width = width
        self._columns = _columns(total_steps, shows_total=width >= _NARROW, has_long_bound=True)
        self._gap = "  "
        if self._length() + _SPARE_FOR_LOSSES > width:
            self._columns = _columns(
                total_steps, shows_total=width >= _NARROW, has_long_bound=False
            )
            self._gap = " "
        while self._length() > width and len(self._columns) > 1:
            self._columns.remove(max(self._columns, key=lambda column: column.rank))

    def header(self) -> list[Text]:
        """What adjacent columns share, where they share anything, and the titles."""
        titles = [_aligned(column, column.title) for column in self._columns]
        headings = Text(self._gap.join(self._headings()).rstrip(), style="dim")
        lines = [headings, Text(self._gap.join(titles).rstrip(), style="dim")]
        for line in lines:
            line.truncate(self.width)
        return lines if headings.plain else lines[1:]

    def row(self, metrics: StepMetrics) -> Text:
        """One line for one step."""
        line = Text()
        for i, column in enumerate(self._columns):
            style = column.style
            if column.title == "bound":
                style = _BOUND_STYLE[metrics.bound]
            line.append(self._gap if i else "")
            line.append(_aligned(column, column.text(metrics)), style=style)
        losses = _losses(metrics, self.width - line.cell_len - len(self._gap))
        if losses:
            line.append(self._gap + losses, style="yellow")
        line.rstrip()
        line.truncate(self.width)
        return line

    def _length(self) -> int:
        widths = [column.width for column in self._columns]
        return sum(widths) + len(self._gap) * (len(widths) - 1)

    def _headings(self) -> list[str]:
        """The headings, each over its run of adjacent columns, left out where it does not fit."""
        texts = []
        i = 0
        while i < len(self._columns):
            heading = self._columns[i].heading
            end = i + 1
            while heading and end < len(self._columns) and self._columns[end].heading == heading:
                end += 1
            run = self._columns[i:end]
            width = sum(column.width for column in run) + len(self._gap) * (len(run) - 1)
            text = next((t for t in (heading, heading[:5]) if len(t) <= width), "")
            texts.append(text.center(width))
            i = end
        return texts


def _columns(total_steps: int | None, *, shows_total: bool, has_long_bound: bool) -> list[_Column]:
    digits = len(str(total_steps)) if total_steps else 6
    if total_steps and shows_total:
        step_width, step_text = 2 * digits + 1, f"{{}}/{total_steps}"
    else:
        step_width, step_text = digits, "{}"
    if has_long_bound:
        bound_width, bound_text = len("synchronisation"), lambda m: m.bound
    else:
        bound_width, bound_text = 5, lambda m: _SHORT_BOUND[m.bound]
    return [
        _Column("step", "", max(step_width, 4), 0, lambda m: step_text.format(m.step)),
        _Column("reward", "", 6, 1, lambda m: short_number(m.reward)),
        _Column("acc", "", 5, 2, lambda m: short_number(m.accuracy), style="bold"),
        _Column(
            "tokens",
            "staleness",
            7,
            3,
            lambda m: _mean_and_max(m.token_staleness_mean, m.token_staleness_max),
        ),
        _Column(
            "groups",
            "staleness",
            7,
            6,
            lambda m: _mean_and_max(m.group_staleness_mean, m.group_staleness_max),
        ),
        _Column("gen", "tokens/s", 5, 7, lambda m: short_count(m.generated_tokens_per_s)),
        _Column("train", "tokens/s", 5, 8, lambda m: short_count(m.trained_tokens_per_s)),
        _Column("time", "", 6, 5, lambda m: short_duration(m.step_time_s)),
        _Column("bound", "", bound_width, 4, bound_text, is_left=True),
    ]


def _aligned(column: _Column, text: str) -> str:
    return text.ljust(column.width) if column.is_left else text.rjust(column.width)


def _mean_and_max(mean: float, maximum: int) -> str:
    text = f"{mean:.1f}/{maximum}"
    return text if len(text) <= 7 else f"{mean:.0f}/{maximum}"


def _losses(metrics: StepMetrics, width: int) -> str:
    """Masked, wasted and rejected, where not zero, as far as they fit into `width`."""
    parts = []
    if metrics.num_masked_tokens:
        parts.append(("masked", "mask", percent(metrics.masked_share)))
    if metrics.num_wasted_tokens:
        parts.append(("wasted", "waste", percent(metrics.wasted_share)))
    if metrics.num_rejected_groups:
        parts.append(("rejected", "rej", str(metrics.num_rejected_groups)))
    long_text = ", ".join(f"{name} {value}" for name, _, value in parts)
    if len(long_text) <= width:
        return long_text
    while parts:
        short_text = " ".join(f"{name} {value}" for _, name, value in parts)
        if len(short_text) <= width:
            return short_text
        parts.pop()
    return ""
