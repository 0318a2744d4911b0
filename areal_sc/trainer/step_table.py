"""The columns of a step's line, and their layout for a terminal.

A file or pipe gets every column, as `name=value` of each of its metrics. A terminal gets aligned
columns, as many as fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from areal_sc.quantities import percent, short_duration, short_number
from areal_sc.records.metrics import Bound, StepMetrics
from areal_sc.rejection import describe_counts
from areal_sc.rewards.base import PART_PREFIX

_NARROW = 70
"""Terminals below this width show the step's number without the total (the bar shows it)."""

_WIDE = 80
"""From this width on a line keeps room for what was lost in its step."""

_ROOM_FOR_LOSSES = len(" waste 0.1%")

_BOUNDS: dict[Bound, str] = {"rollout": "roll", "training": "train", "synchronisation": "sync"}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the table.

    Attributes:
        names: of the metrics that it shows, for `StepMetrics.value`.
        width: characters that every text fits into.
        rank: columns with the largest one leave first when the terminal is narrow.
        text: of the values, which may be None where nothing was measured.
    """

    names: tuple[str, ...]
    title: str
    width: int
    rank: int
    text: Callable[..., str] = short_number
    style: str = ""

    def values(self, metrics: StepMetrics) -> list[Any]:
        return [metrics.value(name) for name in self.names]


def _mean_and_max(mean: float, maximum: int) -> str:
    text = f"{mean:.1f}/{maximum}"
    return text if len(text) <= 7 else f"{mean:.0f}/{maximum}"


def _in_steps(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else percent(value)


COLUMNS = (
    Column(("step",), "step", 4, 0, str),
    Column(("reward",), "reward", 6, 1),
    Column(("accuracy",), "acc", 5, 2, style="bold"),
    Column(("signal_share",), "signal", 6, 5, _share),
    Column(("answer_tokens",), "len", 5, 4),
    Column(("entropy",), "entropy", 7, 3),
    Column(("loss",), "loss", 6, 7),
    Column(("grad_norm",), "grad", 6, 11),
    Column(("proximal_kl",), "kl", 6, 10),
    Column(("behavior_kl",), "kl_b", 6, 15),
    Column(("token_staleness_mean", "token_staleness_max"), "stale", 7, 9, _mean_and_max),
    Column(("group_staleness_mean", "group_staleness_max"), "stale_g", 7, 12, _mean_and_max),
    Column(("lead",), "lead", 4, 16, _in_steps),
    Column(("slack",), "slack", 5, 17, _in_steps),
    Column(("generated_tokens_per_s",), "gen/s", 5, 13),
    Column(("trained_tokens_per_s",), "trn/s", 5, 14),
    Column(("step_time_s",), "time", 6, 6, short_duration),
    Column(("bound",), "bound", 5, 8, lambda bound: _BOUNDS[bound].ljust(5)),
)

_OF_GENERATION = frozenset(
    [
        *("reward", "answer_tokens", "token_staleness_mean", "group_staleness_mean"),
        *("generated_tokens_per_s", "bound"),
    ]
)
"""What says nothing of a step on rows of a data set; what else such a step lacks is None."""

_CAUSES = Column(("rejected_episodes",), "", 0, 0, describe_counts)

LOSSES = (
    Column(("cut_share",), "cut", 0, 0, _share),
    Column(("masked_share",), "mask", 0, 0, percent),
    Column(("wasted_share",), "waste", 0, 0, percent),
    Column(("num_rejected_episodes",), "rej", 0, 0, str),
    _CAUSES,
)
"""Told at the end of a line where they are not zero."""


_MAX_PART_WIDTH = 12


def columns_of(metrics: StepMetrics) -> tuple[Column, ...]:
    """The columns of a run, by its first step, with one for each part of the reward."""
    if metrics.is_of_rows():
        return tuple(
            column
            for column in COLUMNS
            if column.names[0] not in _OF_GENERATION and None not in column.values(metrics)
        )
    names = metrics.reward_parts()
    titles = {name: name.removeprefix(PART_PREFIX)[:_MAX_PART_WIDTH] for name in names}
    parts = (Column((name,), title, max(len(title), 6), 10) for name, title in titles.items())
    return (*COLUMNS[:2], *parts, *COLUMNS[2:])


def named_values(metrics: StepMetrics) -> Iterator[tuple[str, Any]]:
    """Name and value of all that a step's line tells."""
    for column in columns_of(metrics):
        yield from zip(column.names, column.values(metrics), strict=True)
    for column in LOSSES:
        (value,) = column.values(metrics)
        shown = describe_counts(value) if value and isinstance(value, Mapping) else value
        yield column.names[0], shown or None


class StepTable:
    """Lays out step lines for one terminal width; no line is longer than it."""

    def __init__(
        self, width: int, total_steps: int | None, columns: Sequence[Column] = COLUMNS
    ) -> None:
        """Args:
        width: characters a line.
        total_steps: None where it is not known.
        columns: see `columns_of`.
        """
        self.width = width
        total = f"/{total_steps}" if total_steps and width >= _NARROW else ""
        digits = len(str(total_steps or 100_000)) + len(total)
        step = replace(COLUMNS[0], width=max(digits, 4), text=lambda number: f"{number}{total}")
        self._gap = " "
        self._columns = [step, *columns[1:]]
        room = width - _ROOM_FOR_LOSSES if width >= _WIDE else width
        while _length(self._columns, self._gap) > room and len(self._columns) > 1:
            self._columns.remove(max(self._columns, key=lambda column: column.rank))
        if _length(self._columns, "  ") <= room:
            self._gap = "  "

    def header(self) -> Text:
        """The titles."""
        titles = self._gap.join(column.title.rjust(column.width) for column in self._columns)
        line = Text(titles, style="dim")
        line.truncate(self.width)
        return line

    def rows(self, metrics: StepMetrics) -> list[Text]:
        """One line for one step, and one for the causes of rejections where they do not fit."""
        line = Text()
        for column in self._columns:
            text = column.text(*column.values(metrics)).rjust(column.width)
            line.append(self._gap if line else "")
            line.append(text, style=column.style)
        lines = [line]
        for column in LOSSES:
            (value,) = column.values(metrics)
            text = f"{self._gap}{f'{column.title} {column.text(value)}'.lstrip()}"
            if value and line.cell_len + len(text) <= self.width:
                line.append(text, style="yellow")
            elif value and column is _CAUSES:
                lines.append(Text(f"{' ' * self._columns[0].width}{text}", style="yellow"))
        for line in lines:
            line.rstrip()
            line.truncate(self.width, overflow="ellipsis")
        return lines


def _length(columns: Sequence[Column], gap: str) -> int:
    return sum(column.width for column in columns) + len(gap) * (len(columns) - 1)
