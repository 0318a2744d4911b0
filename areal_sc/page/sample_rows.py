"""The samples of a run as a table that is searched, filtered and sorted.

Numbers stay in memory, texts in the file: a row names the place of its line.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from areal_sc.errors import RunFolderError
from areal_sc.page.followed_lines import FollowedLines
from areal_sc.page.row_query import MAX_ROWS, METRIC, SHOWN_CHARS, VERSION, RowQuery
from areal_sc.records.samples import Sample, leave_out_replaced
from areal_sc.system.json_lines import UNDECODABLE

SEARCH_S: Final = 1.0
"""A search gives what it has found by then, and where it goes on."""

NUMBERS: Final = (
    *("step", "group", "reward", "group_reward", "num_tokens", "staleness"),
    *("first_version", "last_version", "time"),
)
"""What rows are filtered and sorted by, beside `metrics.NAME`."""

CHOICES: Final = ("place",)

_NEWEST: Final = 100
"""Rows that tell which metrics there are."""


class SampleRow(Sample, frozen=True, kw_only=True):
    """A sample without its texts.

    Attributes:
        offset: first byte of its line; it names the row.
        num_bytes: of the line.
    """

    offset: int = 0
    num_bytes: int = 0


def sample_query(words: Mapping[str, str]) -> RowQuery:
    """What the parameters of an address ask of samples.

    Raises: ValueError: as `RowQuery.of`.
    """
    return RowQuery.of(words, NUMBERS, CHOICES)


def _number(name: str) -> Callable[[SampleRow], float | None]:
    if name.startswith(METRIC):
        metric = name.removeprefix(METRIC)
        return lambda row: row.metrics.get(metric)
    return lambda row: getattr(row, name)


class SampleRows:
    """Follows `samples.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines = FollowedLines(path, msgspec.json.Decoder(SampleRow).decode)
        self._num_begun = 0
        self._rows: list[SampleRow] = []
        self._order: tuple[RowQuery, int, list[SampleRow]] | None = None

    def follow(self) -> None:
        """Reads what is new."""
        for offset, num_bytes, row in self._lines.read_new():
            self._check_begun()
            leave_out_replaced(self._rows, row)
            bare = msgspec.structs.replace(
                row, offset=offset, num_bytes=num_bytes, prompt="", answer=""
            )
            self._rows.append(bare)
        self._check_begun()

    def _check_begun(self) -> None:
        if self._num_begun != self._lines.num_begun:
            self._num_begun = self._lines.num_begun
            self._rows, self._order = [], None

    def found(self, query: RowQuery, at: int = 0, limit: int = 50) -> dict[str, Any]:
        """Some rows of a query, with the beginnings of their texts.

        Args:
            at: place to go on from, among the rows whose numbers fit.
            limit: rows at most.
        Returns: `rows`; `next`, where to go on (None: nowhere); `num_fitting`, rows whose numbers
            fit; `num_rows`, of the run; `metrics`, names of the workflow's; `damage`.
        Raises: RunFolderError: the file cannot be read any more.
        """
        fitting = self._fitting(query)
        limit = max(1, min(limit, MAX_ROWS))
        wanted, ends = query.text.casefold(), time.monotonic() + SEARCH_S
        shown: list[dict[str, Any]] = []
        place = first = min(max(at, 0), len(fitting))
        with self._texts() as read:
            while place < len(fitting) and len(shown) < limit:
                if wanted and place > first and time.monotonic() > ends:
                    break
                row = fitting[place]
                whole = read(row)
                if wanted in f"{whole.prompt}\0{whole.answer}".casefold():
                    shown.append(_in_list(row, whole))
                place += 1
        return {
            "rows": shown,
            "next": place if place < len(fitting) else None,
            "num_fitting": len(fitting),
            "num_rows": len(self._rows),
            "metrics": self._metric_names(),
            "damage": self._lines.damage,
        }

    def row(self, offset: int) -> dict[str, Any] | None:
        """A row with all of its texts, those of its group, and its neighbours in the file.

        Returns: None: there is none.
        Raises: RunFolderError: as `found`.
        """
        index = next((n for n, row in enumerate(self._rows) if row.offset == offset), None)
        if index is None:
            return None
        row = self._rows[index]
        group = [one for one in self._rows if (one.step, one.group) == (row.step, row.group)]
        with self._texts() as read:
            wholes = [_whole(one, read(one)) for one in group]
        return {
            "row": wholes[group.index(row)],
            "group": wholes,
            "before": self._rows[index - 1].offset if index else None,
            "after": self._rows[index + 1].offset if index + 1 < len(self._rows) else None,
        }

    def of_group(self, group: int) -> list[dict[str, Any]]:
        """The rows of a group, with the beginnings of their texts.

        Raises: RunFolderError: as `found`.
        """
        with self._texts() as read:
            return [_in_list(row, read(row)) for row in self._rows if row.group == group]

    def _metric_names(self) -> list[str]:
        return sorted({name for row in self._rows[-_NEWEST:] for name in row.metrics})

    def _fitting(self, query: RowQuery) -> list[SampleRow]:
        """The rows whose numbers fit, sorted; those without the number come last."""
        ends_at = self._rows[-1].offset if self._rows else -1
        of_texts = replace(query, text="")
        if self._order is not None and self._order[:2] == (of_texts, ends_at):
            return self._order[2]
        rows = self._rows
        if query.choices or query.ranges:
            rows = [row for row in rows if _fits(row, query)]
        number = _number(query.sort)
        numbered = [(value, row) for row in rows if (value := number(row)) is not None]
        numbered.sort(key=lambda pair: pair[0], reverse=query.is_descending)
        fitting = [row for _, row in numbered]
        if len(fitting) < len(rows):
            fitting += [row for row in rows if number(row) is None]
        self._order = of_texts, ends_at, fitting
        return fitting

    @contextmanager
    def _texts(self) -> Iterator[Callable[[SampleRow], SampleRow]]:
        """What reads a row's line again."""
        if not self._rows:
            yield lambda row: row
            return
        try:
            with self._path.open("rb") as file:
                yield lambda row: _decoded(os.pread(file.fileno(), row.num_bytes, row.offset))
        except OSError as error:
            raise RunFolderError(f"{self._path.name} cannot be read: {error.strerror}") from error
        except UNDECODABLE as error:
            raise RunFolderError(f"{self._path.name} has changed meanwhile; try again") from error


_DECODER: Final = msgspec.json.Decoder(SampleRow)


def _decoded(line: bytes) -> SampleRow:
    try:
        return _DECODER.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError):  # no valid UTF-8, as when it was found
        return _DECODER.decode(line.decode(errors="replace").encode())


def _whole(row: SampleRow, texts: SampleRow) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.to_builtins(
        msgspec.structs.replace(row, prompt=texts.prompt, answer=texts.answer)
    )
    return found


def _in_list(row: SampleRow, texts: SampleRow) -> dict[str, Any]:
    """The end of a prompt tells more than its beginning, which many share."""
    found = _whole(row, texts)
    found["prompt"] = texts.prompt[-SHOWN_CHARS:]
    found["answer"] = texts.answer[:SHOWN_CHARS]
    found["prompt_chars"], found["answer_chars"] = len(texts.prompt), len(texts.answer)
    return found


def _fits(row: SampleRow, query: RowQuery) -> bool:
    if query.choices.get("place", row.place) != row.place:
        return False
    for name, (low, high) in query.ranges.items():
        if name == VERSION:
            if row.last_version < low or row.first_version > high:
                return False
            continue
        value = _number(name)(row)
        if value is None or not low <= value <= high:
            return False
    return True
