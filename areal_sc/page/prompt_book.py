"""Which prompts fail: what a `RowIndex` holds, summed up by prompt.

A prompt has a line for each set that it is answered in: training, and each set of held-out prompts,
greedy answers apart. Rewards are followed along the policy versions that sampled the answers.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from areal_sc.page.row_index import RowIndex, metric_columns, state_of
from areal_sc.page.row_query import SHOWN_CHARS

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

SORTS: Final = ("worst", "falling", "unsolved", "rising", "tries", "cut")
"""Orders of lines: lowest mean first; the clearest fall first; never solved, most tries first; the
clearest rise first; most tries first; most cut answers first."""

_SOLVED: Final = 1.0 - 1e-9


class _Lines(NamedTuple):
    """A line a value; of a line's tries: [n] of all tries, line by line, by version.

    Attributes:
        sets: number of its set, among `names`.
        tries, solved: numbers of answers.
        mean, first, newest: rewards: of all, and of the first and the newest version.
        cut: share of answers that were cut; NaN: the workflow does not tell.
        change: of the mean reward, from before to since the version `since`.
        errors: the same in its standard errors.
        parts: [lines, NUM_PARTS] mean reward in each part of the versions; NaN: no tries.
    """

    names: list[str]
    sets: np.ndarray
    dataset: np.ndarray
    row: np.ndarray
    tries: np.ndarray
    mean: np.ndarray
    solved: np.ndarray
    cut: np.ndarray
    first: np.ndarray
    newest: np.ndarray
    last_version: np.ndarray
    change: np.ndarray
    since: np.ndarray
    errors: np.ndarray
    parts: np.ndarray
    versions: tuple[int, int]


class PromptBook:
    """Sums up the rows of an index by prompt, anew when there are others."""

    def __init__(self, index: RowIndex) -> None:
        self._index = index
        self._known: tuple[Any, _Lines | None] = (None, None)

    def found(
        self, of_set: str = "", sort: str = "worst", at: int = 0, limit: int = 50
    ) -> dict[str, Any]:
        """Some lines.

        Args:
            of_set: a name of `sets`; "": any.
            sort: see `SORTS`.
            at: place to go on from.
        Returns: `prompts`, see `_told`; `next`, where to go on (None: nowhere); `num_fitting`
            lines; `sets`, their numbers of prompts; `versions`, first and last of the run;
            `num_changes`, `is_whole`, `damage`: see `RowSearch.found`.
        Raises: ValueError: no such order. RunFolderError: the database cannot be had.
        """
        if sort not in SORTS:
            raise ValueError(f"sort: expected {', '.join(SORTS)}, got {sort!r}")
        with self._index.connected() as database:
            database.execute("BEGIN")
            state = state_of(database)
            lines = self._lines(database, state.edition)
            counts = np.bincount(lines.sets, minlength=len(lines.names)).tolist()
            sets = dict(zip(lines.names, counts, strict=True))
            fitting = _sorted(lines, of_set, sort)
            at, end = max(at, 0), max(at, 0) + max(1, min(limit, MAX_LINES))
            return {
                "prompts": [_told(database, lines, int(it)) for it in fitting[at:end]],
                "next": end if end < len(fitting) else None,
                "num_fitting": len(fitting),
                "sets": sets,
                "versions": lines.versions,
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
            lines = self._lines(database, state_of(database).edition)
            if of_set not in lines.names:
                return None
            is_it = (lines.dataset == dataset) & (lines.row == index)
            places = np.flatnonzero(is_it & (lines.sets == lines.names.index(of_set)))
            if not len(places):
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
                "prompt": _told(database, lines, int(places[0])),
                "tries": [
                    {"name": ".".join(map(str, it[:4])), **dict(zip(names, it[4:], strict=True))}
                    for it in tries[-MAX_TRIES:]
                ],
                "num_left_out": max(0, len(tries) - MAX_TRIES),
            }

    def _lines(self, database: sqlite3.Connection, edition: tuple[int, int]) -> _Lines:
        key, lines = self._known
        if lines is None or key != edition:
            lines = _lines(database)
            self._known = edition, lines
        return lines


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


def _lines(database: sqlite3.Connection) -> _Lines:
    evaluations = [
        name for (name,) in database.execute("SELECT DISTINCT evaluation FROM rows ORDER BY 1")
    ]
    names = sorted({set_of(it) for it in evaluations}, key=lambda it: (it != TRAINED, it))
    accuracy = metric_columns(database).get("accuracy", "NULL")
    cases = " ".join("WHEN ? THEN ?" for _ in evaluations)
    number = f"CASE evaluation {cases} END" if evaluations else "0"
    found = database.execute(
        f'SELECT {number}, dataset, "index", last_version, reward, {accuracy}, '
        f"{_cut_column(database)} FROM rows WHERE reward IS NOT NULL AND last_version IS NOT NULL",
        [it for name in evaluations for it in (name, names.index(set_of(name)))],
    ).fetchall()
    table = np.array(found, np.float64).reshape(-1, 7)  # NULL becomes NaN
    table = table[np.isfinite(table[:, 4])]
    table = table[np.lexsort((table[:, 3], table[:, 2], table[:, 1], table[:, 0]))]
    keys, version = table[:, :3].astype(np.int64), table[:, 3].astype(np.int64)
    reward, cut = table[:, 4], table[:, 6]
    if not len(table):
        none, whole = np.empty(0), np.empty(0, np.int64)
        parts = np.empty((0, NUM_PARTS))
        return _Lines(
            *([], whole, whole, whole, whole, none, none, none, none, none),
            *(whole, none, whole, none, parts, (0, 0)),
        )
    starts = np.flatnonzero(np.r_[True, (keys[1:] != keys[:-1]).any(1)])
    tries = np.diff(np.r_[starts, len(table)])
    line = np.repeat(np.arange(len(starts)), tries)

    def mean(values: np.ndarray, among: np.ndarray) -> np.ndarray:
        """Of each line; NaN: it has none among them."""
        counts = np.bincount(line[among], minlength=len(starts))
        sums = np.bincount(line[among], values[among], len(starts))
        means: np.ndarray = np.full(len(starts), np.nan)
        np.divide(sums, counts, out=means, where=counts > 0)
        return means

    first, last = version[starts], version[starts + tries - 1]
    solved = np.where(np.isnan(table[:, 5]), _as_best(reward, keys[:, 0]), table[:, 5] >= _SOLVED)
    low, high = int(version.min()), int(version.max())
    part = (version - low) * NUM_PARTS // (high - low + 1)
    parts = np.stack([mean(reward, part == it) for it in range(NUM_PARTS)], 1)
    change, since, errors = _changes(reward, version, starts, tries)
    everywhere = np.ones(len(table), bool)
    return _Lines(
        names=names,
        sets=keys[starts, 0],
        dataset=keys[starts, 1],
        row=keys[starts, 2],
        tries=tries,
        mean=mean(reward, everywhere),
        solved=np.bincount(line[solved.astype(bool)], minlength=len(starts)),
        cut=mean(cut, ~np.isnan(cut)),
        first=mean(reward, version == first[line]),
        newest=mean(reward, version == last[line]),
        last_version=last,
        change=change,
        since=since,
        errors=errors,
        parts=parts,
        versions=(low, high),
    )


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


def _sorted(lines: _Lines, of_set: str, sort: str) -> Sequence[int]:
    """The lines of a set, in an order."""
    among = np.ones(len(lines.sets), bool)
    if of_set:
        among &= np.array([name == of_set for name in lines.names] or [False])[lines.sets]
    if sort == "unsolved":
        among &= lines.solved == 0
    key = {
        "worst": lines.mean,
        "falling": lines.errors,
        "unsolved": lines.mean,
        "rising": -lines.errors,
        "tries": -lines.tries.astype(float),
        "cut": -np.nan_to_num(lines.cut),
    }[sort]
    order = np.lexsort((lines.row, lines.dataset, -lines.last_version, -lines.tries, key))
    found: list[int] = order[among[order]].tolist()
    return found


def _told(database: sqlite3.Connection, lines: _Lines, place: int) -> dict[str, Any]:
    """A line: numbers, see `_Lines`, `set`, `text` of the prompt, and its newest `answer`."""
    numbers: dict[str, Any] = {
        name: _number(getattr(lines, name)[place])
        for name in ("dataset", "tries", "mean", "solved", "cut", "first", "newest")
    }
    numbers["index"] = int(lines.row[place])
    of_set = lines.names[int(lines.sets[place])]
    newest = database.execute(
        'SELECT rows.id, "group", rows.attempt, episode, row, reward, evaluation, data_row, prompt,'
        " answer FROM rows JOIN groups ON place = groups.id JOIN texts ON texts.id = rows.id "
        'WHERE dataset = ? AND "index" = ? AND last_version = ? AND reward IS NOT NULL '
        "ORDER BY rows.time DESC, rows.id DESC",
        (numbers["dataset"], numbers["index"], int(lines.last_version[place])),
    )
    found = next((it for it in newest if set_of(it[6]) == of_set), None)
    answer = None
    if found is not None:
        text = found[9].decode(errors="replace")
        name = ".".join(map(str, found[1:5]))
        answer = {"name": name, "reward": found[5], "text": text[:SHOWN_CHARS]}
    return {
        **numbers,
        "set": of_set,
        "last_version": int(lines.last_version[place]),
        "change": _number(lines.change[place]),
        "since": int(lines.since[place]),
        "is_clear": bool(abs(lines.errors[place]) >= CLEAR),
        "parts": [_number(it) for it in lines.parts[place]],
        "text": "" if found is None else found[7],
        "answer": answer,
    }


def _number(value: Any) -> float | int | None:
    """None for NaN."""
    told: float | int = value.item()
    return told if told == told else None
