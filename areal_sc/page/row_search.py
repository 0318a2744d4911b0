"""Recorded rows as a table that is searched, filtered and sorted: queries to a `RowIndex`."""

from __future__ import annotations

import ast
import json
import math
import sqlite3
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from areal_sc.errors import RunFolderError
from areal_sc.page.row_index import EVALUATED, RowIndex, metric_columns, state_of

NUMBERS: Final = (
    *("time", "step", "group", "index", "dataset", "reward", "group_reward"),
    *("num_tokens", "num_trained_tokens", "staleness", "first_version", "last_version"),
    "num_interruptions",
)
"""What rows are filtered and sorted by, beside `metrics.NAME`."""
WORDS: Final = ("worker", "outcome", "cause", "evaluation")
"""What rows are filtered by as it is."""
EVERY: Final = "*"
"""`evaluation=*`: also answers of evaluations; else they are left out, unless asked for."""
METRIC: Final = "metrics."
"""Begins the name of a number that the workflow reports of a row."""
VERSION: Final = "version"
"""Rows are filtered by it, too: that of any of their tokens."""
SHOWN_CHARS: Final = 400
"""Characters of a text in a list."""
MAX_ROWS: Final = 500
"""Rows of one answer."""
SEARCH_S: Final = 0.5
"""A search gives what it has found by then, and where it goes on."""

_PLAIN: Final = ("text", "sort", "at", "limit", "key")
_NAME: Final = ("group", "attempt", "episode", "row")
_SHOWN: Final = (*_NAME, *NUMBERS, *WORDS, "output")
_AT_ONCE: Final = 100
"""Rows whose texts are read together."""


@dataclass(frozen=True)
class RowQuery:
    """Which rows are asked for.

    Attributes:
        text: in prompt or answer, in small letters or capitals; "": any.
        choices: name of a word that rows have -> the wanted one.
        ranges: name of a number -> smallest and largest value.
        sort: name of a number.
    """

    text: str
    choices: Mapping[str, str]
    ranges: Mapping[str, tuple[float, float]]
    sort: str
    is_descending: bool


def recorded_query(words: Mapping[str, str]) -> RowQuery:
    """What the parameters of an address ask of recorded rows: `reward=0..0.5`, `sort=-step`.

    With `-` the largest number comes first; where no order is named the newest rows do.

    Raises: ValueError: a name or a range is none.
    """
    ranges, choices = {}, {}
    for name, text in words.items():
        if name in NUMBERS or name == VERSION or name.startswith(METRIC):
            if text:
                ranges[name] = _range(name, text)
        elif name in WORDS:
            if text:
                choices[name] = text
        elif name not in _PLAIN:
            known = ", ".join((*NUMBERS, VERSION, *WORDS))
            raise ValueError(f"expected {known} or metrics.NAME, got {name!r}")
    sort = words.get("sort") or "-time"
    name = sort.removeprefix("-")
    if name not in NUMBERS and not name.startswith(METRIC):
        raise ValueError(f"sort: expected {', '.join(NUMBERS)} or metrics.NAME, got {name!r}")
    return RowQuery(words.get("text", ""), choices, ranges, name, sort.startswith("-"))


def _range(name: str, text: str) -> tuple[float, float]:
    first, dots, last = text.partition("..")
    try:
        low = float(first) if first.strip() else -math.inf
        high = (float(last) if last.strip() else math.inf) if dots else low
    except ValueError:
        low = high = math.nan
    if math.isnan(low) or math.isnan(high):
        raise ValueError(f"{name}: expected a number, or a range such as 0..0.5, got {text!r}")
    return low, high


class RowSearch:
    """Answers queries, and remembers the last one: a reader turns its pages."""

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._fitting: tuple[Any, list[int]] = (None, [])
        self._facets: tuple[Any, dict[str, Any]] = (None, {})

    def found(self, query: RowQuery, at: int = 0, limit: int = 50) -> dict[str, Any]:
        """Some rows of a query, with parts of their texts: of a search around what was found.

        Args:
            at: place to go on from, among the rows whose numbers fit.
            limit: rows at most.
        Returns: `rows`; `next`, where to go on (None: nowhere); `num_fitting`, rows whose numbers
            fit; `num_rows`, of training; `metrics`, names of the workflow's; `worker`, `outcome`,
            `cause` and `evaluation`: how many rows have which; `has_texts`: a tokenizer is
            there; `is_whole`: all rows are read; `num_changes`, see `RowIndex.follow`; `damage`.
        Raises: RunFolderError: the database cannot be had.
        """
        limit = max(1, min(limit, MAX_ROWS))
        wanted, ends = query.text, time.monotonic() + SEARCH_S
        with self._index.connected() as database:
            database.execute("BEGIN")  # nothing changes meanwhile
            state = state_of(database)
            fitting = self._ids(database, query, state.edition)
            place = first = min(max(at, 0), len(fitting))
            hits = list[tuple[int, str, str]]()
            while place < len(fitting) and len(hits) < limit:
                if wanted and place > first and time.monotonic() > ends:
                    break
                num = _AT_ONCE if wanted else min(_AT_ONCE, limit - len(hits))
                some = fitting[place : place + num]
                for number, prompt, answer in _texts(database, some):
                    if not wanted or _has(wanted, prompt, answer):
                        hits.append((number, _text(prompt), _text(answer)))
                    place += 1
                    if len(hits) == limit:
                        break
            return {
                "rows": _rows(database, hits, wanted),
                "next": place if place < len(fitting) else None,
                "num_fitting": len(fitting),
                **self._counted(database, state.edition),
                "has_texts": state.has_texts,
                "is_whole": self._index.is_whole,
                "num_changes": state.num_changes,
                "damage": self._index.damage,
            }

    def every(self, query: RowQuery) -> Iterator[list[dict[str, Any]]]:
        """All rows of a query with all of their texts, each once, as they are at the first look.

        Rows that go meanwhile are left out.

        Raises: RunFolderError: the database cannot be had, or was made anew meanwhile.
        """
        with self._index.connected() as database:
            database.execute("BEGIN")
            state = state_of(database)
            fitting = self._ids(database, query, state.edition)
        for first in range(0, len(fitting), MAX_ROWS):
            some = fitting[first : first + MAX_ROWS]
            marks = ", ".join("?" * len(some))
            with self._index.connected() as database:
                database.execute("BEGIN")
                if state_of(database).made != state.made:
                    raise RunFolderError("the rows are being read anew: ask for them again")
                found = database.execute(f"SELECT id FROM rows WHERE id IN ({marks})", some)
                left = {number for (number,) in found}
                texts = _texts(database, [number for number in some if number in left])
                hits = [
                    (number, _text(prompt), _text(answer))
                    for number, prompt, answer in texts
                    if not query.text or _has(query.text, prompt, answer)
                ]
                rows = _rows(database, hits, None)
            yield rows

    def of_group(self, group: int) -> list[dict[str, Any]]:
        """The rows of a group with all of their texts, in order; the newest attempt comes last.

        Raises: RunFolderError: the database cannot be had.
        """
        with self._index.connected() as database:
            database.execute("BEGIN")
            found = database.execute(
                "SELECT rows.id FROM rows JOIN groups ON place = groups.id WHERE number = ? "
                "ORDER BY rows.attempt, episode, row",
                (group,),
            )
            texts = _texts(database, [number for (number,) in found])
            return _rows(database, [(it, _text(a), _text(b)) for it, a, b in texts], None)

    def rewards(self, groups: Collection[int]) -> dict[tuple[int, int], tuple[float, ...]]:
        """(group, attempt) -> mean, lowest and highest reward of those that have rows.

        Raises: RunFolderError: the database cannot be had.
        """
        marks = ", ".join("?" * len(groups))
        with self._index.connected() as database:
            found = database.execute(
                'SELECT "group", rows.attempt, max(group_reward), min(reward), max(reward) '
                "FROM rows JOIN groups ON place = groups.id "
                f"WHERE number IN ({marks}) AND reward IS NOT NULL GROUP BY place",
                [*groups],
            )
            return {(group, attempt): tuple(its) for group, attempt, *its in found}

    def data_rows(self, wanted: Collection[tuple[int, int]]) -> dict[tuple[int, int], str]:
        """(number, dataset) -> a row of a dataset, of those of which a group is recorded.

        Raises: RunFolderError: the database cannot be had.
        """
        among = ", ".join(["(?, ?)"] * len(wanted)) or "(NULL, NULL)"
        with self._index.connected() as database:
            found = database.execute(
                'SELECT DISTINCT "index", dataset, data_row FROM rows JOIN groups '
                f'ON place = groups.id WHERE ("index", dataset) IN (VALUES {among})',
                [number for it in wanted for number in it],
            )
            return {(index, dataset): text for index, dataset, text in found}

    def _ids(
        self, database: sqlite3.Connection, query: RowQuery, edition: tuple[int, int]
    ) -> list[int]:
        """The rows whose numbers fit, sorted; those without the number come last."""
        choices, ranges = (tuple(sorted(it.items())) for it in (query.choices, query.ranges))
        key = (choices, ranges, query.sort, query.is_descending, edition)
        if self._fitting[0] == key:
            return self._fitting[1]
        columns = metric_columns(database)
        where, values = _condition(query, columns)
        column, way = _column(query.sort, columns), "DESC" if query.is_descending else "ASC"
        found = database.execute(
            f"SELECT id FROM rows WHERE {where} ORDER BY {column} IS NULL, {column} {way}, "
            f"id {way}",
            values,
        )
        fitting = [number for (number,) in found]
        self._fitting = key, fitting
        return fitting

    def _counted(self, database: sqlite3.Connection, edition: tuple[int, int]) -> dict[str, Any]:
        if self._facets[0] != edition:
            facets: dict[str, Any] = {
                name: dict(
                    database.execute(
                        f'SELECT "{name}", count(*) FROM rows WHERE "{name}" != \'\' GROUP BY 1'
                    )
                )
                for name in WORDS
            }
            (facets["num_rows"],) = database.execute(
                "SELECT count(*) FROM rows WHERE evaluation = ''"
            ).fetchone()
            facets["metrics"] = sorted(metric_columns(database))
            self._facets = edition, facets
        return self._facets[1]


def _condition(query: RowQuery, columns: Mapping[str, str]) -> tuple[str, list[Any]]:
    asks = "evaluation" in query.choices or query.choices.get("outcome") == EVALUATED
    parts, values = ["1" if asks else "evaluation = ''"], list[Any]()
    for name, (low, high) in query.ranges.items():
        if name == VERSION:
            parts.append("last_version >= ? AND first_version <= ?")
        else:
            parts.append(f"{_column(name, columns)} BETWEEN ? AND ?")
        values += low, high
    for name, text in query.choices.items():
        if (name, text) != ("evaluation", EVERY):
            parts.append(f'"{name}" = ?')
            values.append(text)
    return " AND ".join(parts), values


def _column(name: str, columns: Mapping[str, str]) -> str:
    """The column of a number; NULL of a metric that no row has."""
    if name.startswith(METRIC):
        return columns.get(name.removeprefix(METRIC), "NULL")
    return f'"{name}"'


def _texts(
    database: sqlite3.Connection, numbers: Sequence[int]
) -> Iterator[tuple[int, bytes, bytes]]:
    """Prompt and answer of some rows, in their order."""
    marks = ", ".join("?" * len(numbers))
    found = database.execute(
        f"SELECT id, prompt, answer FROM texts WHERE id IN ({marks})", tuple(numbers)
    )
    known = {row[0]: row for row in found}
    return (known.get(number, (number, b"", b"")) for number in numbers)


def _text(content: bytes) -> str:
    return content.decode(errors="replace")


def _has(wanted: str, prompt: bytes, answer: bytes) -> bool:
    if wanted.isascii():  # of other bytes nothing becomes one of its
        small = wanted.lower().encode()
        return small in answer.lower() or small in prompt.lower()
    folded = wanted.casefold()
    return folded in _text(answer).casefold() or folded in _text(prompt).casefold()


def _numbers(database: sqlite3.Connection, numbers: Sequence[int]) -> list[dict[str, Any]]:
    """All numbers, words and pictures of some rows, in order; `metrics` are those they have."""
    columns = metric_columns(database)
    names = ", ".join(f'rows."{name}"' for name in (*_SHOWN, *columns.values()))
    marks = ", ".join("?" * len(numbers))
    found = database.execute(
        f"SELECT rows.id, data_row, pictures, {names} FROM rows JOIN groups ON place = groups.id "
        f"WHERE rows.id IN ({marks})",
        tuple(numbers),
    ).fetchall()
    known = {}
    for number, data_row, pictures, *values in found:
        metrics = zip(columns, values[len(_SHOWN) :], strict=True)
        known[number] = {
            **dict(zip(_SHOWN, values, strict=False)),
            "metrics": {name: value for name, value in metrics if value is not None},
            "right_answer": _right_answer(data_row),
            "pictures": json.loads(pictures),
        }
    return [known[number] for number in numbers]


def _rows(
    database: sqlite3.Connection, hits: Sequence[tuple[int, str, str]], wanted: str | None
) -> list[dict[str, Any]]:
    """Args: wanted: what a search has found them by: parts of their texts are shown; None: all."""
    rows = _numbers(database, [number for number, _, _ in hits])
    for row, (_, prompt, answer) in zip(rows, hits, strict=True):
        row["prompt_chars"], row["answer_chars"] = len(prompt), len(answer)
        row["prompt"], row["prompt_at"] = prompt, 0
        row["answer"], row["answer_at"] = answer, 0
        if wanted is not None:
            # the end of a prompt tells more than its beginning, which many share
            row["prompt_at"] = _beginning(prompt, wanted, max(0, len(prompt) - SHOWN_CHARS))
            row["answer_at"] = _beginning(answer, wanted, 0)
            row["prompt"] = prompt[row["prompt_at"] :][:SHOWN_CHARS]
            row["answer"] = answer[row["answer_at"] :][:SHOWN_CHARS]
    return rows


def _right_answer(data_row: str) -> str:
    """The `answer` of a row of a dataset; "": nothing, or the row is too long to be told."""
    try:
        row = ast.literal_eval(data_row)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ""
    answer = row.get("answer") if isinstance(row, dict) else None
    return "" if answer is None else str(answer)[:SHOWN_CHARS]


def _beginning(text: str, wanted: str, without: int) -> int:
    """Where the shown part of a text begins.

    Args:
        without: where nothing was searched for, or it stands in there.
    """
    at = text.lower().find(wanted.lower()) if wanted else -1
    if at < 0 or without <= at <= without + SHOWN_CHARS - len(wanted):
        return without
    return max(0, at - SHOWN_CHARS // 4)
