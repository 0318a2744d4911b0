"""Which prompts fail: what a `RowIndex` holds, summed up by prompt.

A prompt has a line for each set that it is answered in: training, and each set of held-out prompts,
greedy answers apart. Rewards are followed along the policy versions that sampled the answers.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from areal_sc.page.row_index import RowIndex, metric_columns, state_of
from areal_sc.page.row_search import SHOWN_CHARS

TRAINED: Final = "training"
"""The set of what is no evaluation's."""
NUM_PARTS: Final = 16
"""Parts of a run's versions, of which each line tells the mean reward."""
CLEAR: Final = 5.0
"""A change of so many standard errors is none by chance: rewards that are 1 by the toss of a coin
have one in less than a hundredth of the prompts."""
MAX_LINES: Final = 200
"""Lines of one answer."""
MAX_TRIES: Final = 5000
"""Tries of a prompt that are told, the newest ones."""

_Line = dict[str, Any]
"""What is told of a prompt in a set.

set, dataset, index: the prompt's. tries, solved: numbers of answers. mean, first, newest: rewards
of all, and of the answers of the first and of the newest version. cut: share of answers that were
cut; None: the workflow does not tell. last_version: the newest one. change: of the mean reward,
from before to since the version `since`; errors: the same in its standard errors. parts: mean
reward in each of `NUM_PARTS` parts of the run's versions; None: no tries.
"""

_ORDERS: Final[Mapping[str, Callable[[_Line], float]]] = {
    "worst": lambda it: it["mean"],
    "falling": lambda it: it["errors"],
    "unsolved": lambda it: it["mean"],
    "rising": lambda it: -it["errors"],
    "tries": lambda it: -it["tries"],
    "cut": lambda it: -(it["cut"] or 0),
}
"""What lines are sorted by, then by most tries and newest version; the never solved alone are
`unsolved`."""

_SOLVED: Final = 1.0 - 1e-9


class _PromptLines(NamedTuple):
    """All lines, and the first and the last version of the run."""

    lines: list[_Line]
    versions: tuple[int, int]


class PromptBook:
    """Sums up the rows of an index by prompt, anew when there are others."""

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._lock = threading.Lock()
        self._known: tuple[Any, _PromptLines] = (None, _PromptLines([], (0, 0)))
        self._again_at_s = 0.0

    def found(
        self, of_set: str = "", sort: str = "worst", at: int = 0, limit: int = 50
    ) -> dict[str, Any]:
        """Some lines.

        Args:
            of_set: a name of `sets`; "": any.
            sort: `worst`, `falling`, `unsolved`, `rising`, `tries` or `cut`.
            at: place to go on from.
        Returns: `prompts`, each a line with the `text` of the prompt, the newest `answer`, and
            `is_clear`: the change is none by chance; `next`, where to go on (None: nowhere);
            `num_fitting` lines; `sets`, their numbers of prompts; `versions`, first and last of
            the run; `num_changes`, `is_whole`, `damage`: see `RowSearch.found`.
        Raises: ValueError: no such order. RunFolderError: the database cannot be had.
        """
        if sort not in _ORDERS:
            raise ValueError(f"sort: expected {', '.join(_ORDERS)}, got {sort!r}")
        with self._index.connected() as database:
            database.execute("BEGIN")
            state = state_of(database)
            lines, versions = self._summary(database, state.edition)
            fitting = [
                it
                for it in lines
                if of_set in ("", it["set"]) and not (sort == "unsolved" and it["solved"])
            ]
            rank = _ORDERS[sort]
            fitting.sort(key=lambda it: (rank(it), -it["tries"], -it["last_version"]))
            at, end = max(at, 0), max(at, 0) + max(1, min(limit, MAX_LINES))
            return {
                "prompts": [it for line in fitting[at:end] if (it := _told(database, line))],
                "next": end if end < len(fitting) else None,
                "num_fitting": len(fitting),
                "sets": Counter(it["set"] for it in lines),
                "versions": versions,
                "num_changes": state.num_changes,
                "is_whole": self._index.is_whole,
                "damage": self._index.damage,
            }

    def tries(self, of_set: str, dataset: int, index: int) -> dict[str, Any] | None:
        """All tries of a prompt in a set.

        Returns: `prompt`, its line; `tries`, by version: each a dict of `name` (group, attempt,
            episode, row), `version`, `reward`, `cut`, `num_tokens`, `evaluation`; `num_left_out`,
            older ones. None: there is no such line.
        Raises: RunFolderError: the database cannot be had.
        """
        with self._index.connected() as database:
            database.execute("BEGIN")
            lines, _ = self._summary(database, state_of(database).edition)
            name = of_set, dataset, index
            line = next((it for it in lines if _name(it) == name), None)
            if line is None:
                return None
            found = database.execute(
                f'SELECT "group", attempt, episode, row, last_version, reward, '
                f"{_cut_column(database)}, num_tokens, evaluation FROM rows WHERE dataset = ? "
                'AND "index" = ? AND reward IS NOT NULL AND last_version IS NOT NULL '
                "ORDER BY last_version, time, id",
                (dataset, index),
            ).fetchall()
            tries = [it for it in found if set_of(it[-1]) == of_set]
            names = ("version", "reward", "cut", "num_tokens", "evaluation")
            return {
                "prompt": _told(database, line),
                "tries": [
                    {"name": ".".join(map(str, it[:4])), **dict(zip(names, it[4:], strict=True))}
                    for it in tries[-MAX_TRIES:]
                ],
                "num_left_out": max(0, len(tries) - MAX_TRIES),
            }

    def _summary(self, database: sqlite3.Connection, edition: tuple[int, int]) -> _PromptLines:
        """One of a moment ago where rows keep coming: it takes a tenth of the time at most."""
        with self._lock:
            began_s = time.monotonic()
            if self._known[0] != edition and began_s >= self._again_at_s:
                self._known = edition, _summary(database)
                now_s = time.monotonic()
                self._again_at_s = now_s + 9 * (now_s - began_s)
            return self._known[1]


def _name(line: _Line) -> tuple[str, int, int]:
    return line["set"], line["dataset"], line["index"]


def set_of(evaluation: str) -> str:
    """The set of an answer, by the name of its evaluation's result; "": it is trained."""
    if not evaluation:
        return TRAINED
    name, _, kind = evaluation.rpartition("/")
    return f"{name or 'held out'}, greedy" if kind == "greedy" else name or "held out"


def _cut_column(database: sqlite3.Connection) -> str:
    """SQL: 1 for an answer that was cut, 0 for another one, NULL where nothing tells."""
    stopped = metric_columns(database).get("stopped")
    return f"({stopped} = 0)" if stopped else "NULL"


def _summary(database: sqlite3.Connection) -> _PromptLines:
    evaluations = [name for (name,) in database.execute("SELECT DISTINCT evaluation FROM rows")]
    names = sorted({set_of(it) for it in evaluations}, key=lambda it: (it != TRAINED, it))
    accuracy = metric_columns(database).get("accuracy", "NULL")
    cases = " ".join("WHEN ? THEN ?" for _ in evaluations)
    found = database.execute(
        f'SELECT CASE evaluation {cases or "WHEN 0 THEN 0"} END, dataset, "index", last_version, '
        f"reward, {accuracy}, {_cut_column(database)} FROM rows "
        "WHERE reward IS NOT NULL AND last_version IS NOT NULL",
        [it for name in evaluations for it in (name, names.index(set_of(name)))],
    ).fetchall()
    table = np.array(found, np.float64).reshape(-1, 7)  # NULL becomes NaN
    table = table[np.isfinite(table[:, 4])]
    if not len(table):
        return _PromptLines([], (0, 0))
    table = table[np.lexsort((table[:, 3], table[:, 2], table[:, 1], table[:, 0]))]
    keys, version = table[:, :3].astype(np.int64), table[:, 3].astype(np.int64)
    reward, cut = table[:, 4], table[:, 6]
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(1)])
    tries = np.diff(np.r_[starts, len(table)])
    line = np.repeat(np.arange(len(starts)), tries)

    def mean(values: np.ndarray, among: np.ndarray) -> list[float | None]:
        """Of each line; None: it has none among them."""
        counts = np.bincount(line[among], minlength=len(starts)).tolist()
        sums = np.bincount(line[among], values[among], len(starts)).tolist()
        return [total / count if count else None for total, count in zip(sums, counts, strict=True)]

    first, last = version[starts], version[starts + tries - 1]
    solved = np.where(np.isnan(table[:, 5]), _as_best(reward, keys[:, 0]), table[:, 5] >= _SOLVED)
    low, high = int(version.min()), int(version.max())
    part = (version - low) * NUM_PARTS // (high - low + 1)
    change, since, errors = _changes(reward, version, starts, tries)
    columns = {
        "set": [names[it] for it in keys[starts, 0].tolist()],
        "dataset": keys[starts, 1].tolist(),
        "index": keys[starts, 2].tolist(),
        "tries": tries.tolist(),
        "mean": mean(reward, np.ones(len(table), bool)),
        "solved": np.bincount(line[solved.astype(bool)], minlength=len(starts)).tolist(),
        "cut": mean(cut, ~np.isnan(cut)),
        "first": mean(reward, version == first[line]),
        "newest": mean(reward, version == last[line]),
        "last_version": last.tolist(),
        "change": change.tolist(),
        "since": since.tolist(),
        "errors": errors.tolist(),
        "parts": [*zip(*(mean(reward, part == it) for it in range(NUM_PARTS)), strict=True)],
    }
    lines = [dict(zip(columns, its, strict=True)) for its in zip(*columns.values(), strict=True)]
    return _PromptLines(lines, (low, high))


def _as_best(reward: np.ndarray, sets: np.ndarray) -> np.ndarray:
    """[n] whether a reward is the highest one of its set: what solves a prompt without accuracy."""
    best = np.full(int(sets.max()) + 1, -np.inf)
    np.maximum.at(best, sets, reward)
    is_best: np.ndarray = reward >= best[sets]
    return is_best


def _changes(
    reward: np.ndarray, version: np.ndarray, starts: np.ndarray, tries: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the rewards of each line change most: by how much, since which version, how clearly.

    With n tries, k of them before, and the sums of squares S of all and B between both parts, the
    clearness is sqrt(n B / (S - B + S / sqrt(n))): the t of the best split, whose denominator few
    tries that happen to be equal do not make zero.
    """
    line = np.repeat(np.arange(len(starts)), tries)
    centred = reward - (np.add.reduceat(reward, starts) / tries)[line]
    sums = np.cumsum(centred)
    before = sums - (sums[starts] - centred[starts])[line]  # of a line's tries up to this one
    count = np.arange(len(reward)) - starts[line] + 1
    rest = tries[line] - count
    # each part has an eighth of the tries: else one odd answer at an end would be a change
    is_part = np.minimum(count, rest) >= np.maximum(tries[line] / 8, 1)
    may_part = is_part & (np.r_[version[1:], -1] != version)
    scale = tries[line] / np.maximum(count * rest, 1)
    between = np.where(may_part, before**2 * scale, -1.0)
    order = np.lexsort((between, line))
    best = order[starts + tries - 1]
    has_one = between[best] >= 0
    whole = np.add.reduceat(centred**2, starts)
    squares = np.where(has_one, between[best], 0.0)
    change = np.where(has_one, -before[best] * scale[best], 0.0)
    room = whole - squares + whole / np.sqrt(tries)
    clear = np.sqrt(np.divide(tries * squares, room, out=np.zeros(len(starts)), where=room > 1e-12))
    since = np.where(has_one, version[np.minimum(best + 1, len(version) - 1)], version[starts])
    return change, since, np.copysign(clear, change)


def _told(database: sqlite3.Connection, line: _Line) -> dict[str, Any] | None:
    """A line as a page gets it; None: its rows have just gone."""
    newest = database.execute(
        'SELECT "group", rows.attempt, episode, row, reward, evaluation, data_row, answer FROM rows'
        " JOIN groups ON place = groups.id JOIN texts ON texts.id = rows.id "
        'WHERE dataset = ? AND "index" = ? AND last_version = ? AND reward IS NOT NULL '
        "ORDER BY rows.time DESC, rows.id DESC",
        (line["dataset"], line["index"], line["last_version"]),
    )
    found = next((it for it in newest if set_of(it[5]) == line["set"]), None)
    if found is None:
        return None
    *name, reward, _, text, answer = found
    return {
        **line,
        "is_clear": abs(line["errors"]) >= CLEAR,
        "text": text,
        "answer": {
            "name": ".".join(map(str, name)),
            "reward": reward,
            "text": answer.decode(errors="replace")[:SHOWN_CHARS],
        },
    }
