"""What the processes of a run did when, as a page draws it: a lane a line, spans as columns.

Spans are kept in columns of numbers. A page asks for those of a time; where several would be
narrower than a pixel of their lane, it gets the longest one of them, and where these are still too
many to be drawn at once, the longest one of some pixels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from areal_sc.page.followed_blocks import FollowedBlocks
from areal_sc.page.stamps import Stamp
from areal_sc.records.blocks import read_body
from areal_sc.records.record_files import Series
from areal_sc.records.spans import LOST, SCRIPT, RecordedSpan, pack_spans, unpack_spans

FETCHING: Final = "fetching weights"
UPDATING: Final = "updating weights"
MAX_WIDTH: Final = 8192
"""Most pixels of a line for which a page may ask."""
MIN_LANES: Final = 8
"""Lanes of one worker up to so many are drawn one by one however small they are."""
_LEAST_S: Final = 1e-3
"""Of a view in which there is something to count."""
DENSITY_PIXELS: Final = 3
"""Width of a bar in which more lanes are drawn together."""
MAX_SPANS: Final = 200_000
"""Spans that a page gets, about: it draws them in half a second."""

_Columns = tuple[np.ndarray, np.ndarray, np.ndarray]
"""kinds [n], numbers [5, n], times [2, n]: see `SpanColumns`; with places among all names."""

_LANE, _FIRST, _LAST, _TOKENS, _ABOUT = range(5)


class _SpansOfProcess:
    """The spans of one process."""

    def __init__(self) -> None:
        self.num_lanes = 0
        self._new: list[_Columns] = []
        self._all = _empty()

    def add(self, kinds: np.ndarray, numbers: np.ndarray, times: np.ndarray) -> None:
        self._new.append((kinds, numbers, times))
        self.num_lanes = max(self.num_lanes, int(numbers[_LANE].max(initial=-1)) + 1)

    @property
    def columns(self) -> _Columns:
        """All of them."""
        if self._new:
            parts = zip(self._all, *self._new, strict=True)
            kinds, numbers, times = (np.concatenate(part, axis=-1) for part in parts)
            self._all, self._new = (kinds, numbers, times), []
        return self._all


def _empty() -> _Columns:
    return np.empty(0, np.int32), np.empty((5, 0), np.int32), np.empty((2, 0))


class TimeLine:
    """Follows the files of spans in `records/`, and is told what the script did."""

    def __init__(self, folder: Path) -> None:
        self._blocks = FollowedBlocks(folder, (Series.spans,))
        self._processes: dict[str, _SpansOfProcess] = {}
        self._kinds: dict[str, int] = {}
        self._abouts: dict[str, int] = {}
        self._num_lost = 0

    def stamp(self) -> Stamp:
        """It changes when there are new spans."""
        return self._blocks.stamp()

    def follow(self) -> None:
        """Reads what is new."""
        if self._blocks.begins_again():
            self._num_lost, of_script = 0, self._processes.pop(SCRIPT, None)
            self._processes = {SCRIPT: of_script} if of_script else {}
        for file, descriptor, found in self._blocks.read_new():
            try:
                self._add(file.process, read_body(descriptor, found))
            except ValueError as error:
                self._blocks.note_bad(file, str(error))

    def add_of_script(self, spans: list[RecordedSpan]) -> None:
        """What the script did."""
        if spans:
            self._add(SCRIPT, pack_spans(spans))

    def forget_script(self) -> None:
        """What the script did is told anew."""
        self._processes.pop(SCRIPT, None)

    def _add(self, process: str, body: bytes) -> None:
        """Raises: ValueError: it is no body of spans."""
        columns = unpack_spans(body)
        kinds, numbers, times = columns.arrays()
        if LOST in columns.names:
            places = numbers[_ABOUT][kinds == columns.names.index(LOST)]
            self._num_lost += sum(int(columns.abouts[place]) for place in places)
        numbers = numbers.copy()
        numbers[_ABOUT] = _places(columns.abouts, self._abouts)[numbers[_ABOUT]]
        self._processes.setdefault(process, _SpansOfProcess()).add(
            _places(columns.names, self._kinds)[kinds], numbers, times
        )

    @property
    def lost(self) -> list[str]:
        """How many records no worker had room for, in a sentence, if there are any."""
        why = (
            "they came faster than they could be written, or while the run folder was out of reach"
        )
        return [f"{self._num_lost} records are lost: {why}"] if self._num_lost else []

    def held(self) -> dict[str, int]:
        """Name of a process -> the policy version that it began to sample by last."""
        updates = {name: self._updates(it) for name, it in self._processes.items()}
        return {name: told[-1][1] for name, told in updates.items() if told}

    def shown(self, first: float | None, last: float | None, width: int) -> dict[str, Any]:
        """What a page draws of a time.

        Args:
            first, last: Unix times in seconds; None: as far as there are spans.
            width: pixels of a line.
        Returns: `begin` and `end` of all spans, None without any; `first`, `last`; `kinds`,
            `abouts`: names; `processes`: of each `name`, `num_lanes`, `updates` (when a version
            began to be sampled by, and the version), `totals` (kind -> number of spans and their
            seconds within the time), `density` (of more than `MIN_LANES` lanes, kind -> of equally
            long parts of the time, how many lanes did it on average), and as columns `lane`,
            `kind`, `began` (seconds after `first`), `took`, `first_version`, `last_version`,
            `tokens`, `about`; `num_left_out`: spans beside which a longer one is shown; `damage`.
        """
        begin, end = self._range()
        first = begin if first is None else first
        last = end if last is None else last
        width = min(max(width, 1), MAX_WIDTH)
        told: dict[str, Any] = {
            "begin": begin,
            "end": end,
            "first": first,
            "last": last,
            "kinds": list(self._kinds),
            "damage": [*self._blocks.damage, *self.lost],
        }
        if first is None or last is None or begin is None:
            return {**told, "processes": [], "abouts": [], "num_left_out": 0}
        used: dict[int, int] = {}
        num_left_out, processes = 0, []
        for name in sorted(self._processes, key=lambda name: (name != SCRIPT, _ordered(name))):
            process = self._processes[name]
            most = MAX_SPANS // len(self._processes)
            chosen, left_out = _chosen(process.columns, first, last, width, most)
            num_left_out += left_out
            processes.append(
                {
                    "name": name,
                    "num_lanes": process.num_lanes,
                    "updates": self._updates(process),
                    "totals": self._totals(process, first, last),
                    "density": self._density(process, first, last, width // DENSITY_PIXELS),
                    **_as_columns(process.columns, chosen, first, used),
                }
            )
        abouts = list(self._abouts)
        told["abouts"] = [abouts[place] for place in used]
        return {**told, "processes": processes, "num_left_out": num_left_out}

    def _range(self) -> tuple[float | None, float | None]:
        of_all = [it.columns[2] for it in self._processes.values()]
        filled = [times for times in of_all if times.shape[1]]
        if not filled:
            return None, None
        begin = min(float(times[0].min()) for times in filled)
        return begin, max(float((times[0] + times[1]).max()) for times in filled)

    def _updates(self, process: _SpansOfProcess) -> list[tuple[float, int]]:
        """From when on which version was sampled by: once it was there, or was being brought."""
        kinds, numbers, times = process.columns
        is_update = kinds == self._kinds.get(UPDATING, -1)
        versions, begins = numbers[_FIRST][is_update].tolist(), times[0][is_update].tolist()
        since = dict(zip(versions, begins, strict=True))
        is_fetch = kinds == self._kinds.get(FETCHING, -1)
        versions, ends = numbers[_FIRST][is_fetch].tolist(), times[:, is_fetch].sum(0).tolist()
        fetched = dict(zip(versions, ends, strict=True))
        since |= {version: ended for version, ended in fetched.items() if version in since}
        return sorted((when, version) for version, when in since.items())

    def _totals(self, process: _SpansOfProcess, first: float, last: float) -> Mapping[str, Any]:
        kinds, _, (began, took) = process.columns
        within = np.clip(np.minimum(began + took, last) - np.maximum(began, first), 0, None)
        is_seen = (began <= last) & (began + took >= first)
        counts = np.bincount(kinds[is_seen], minlength=len(self._kinds)).tolist()
        seconds = np.bincount(kinds[is_seen], within[is_seen], len(self._kinds)).tolist()
        return {
            name: (counts[place], round(seconds[place], 6))
            for name, place in self._kinds.items()
            if counts[place]
        }

    def _density(
        self, process: _SpansOfProcess, first: float, last: float, num_parts: int
    ) -> dict[str, list[float]]:
        if process.num_lanes <= MIN_LANES or last - first < _LEAST_S:
            return {}
        kinds, numbers, (began, took) = process.columns
        edges = np.linspace(first, last, max(1, num_parts) + 1)
        is_seen = (numbers[_LANE] >= 0) & (began <= last) & (began + took >= first)
        found = {}
        for name, place in self._kinds.items():
            its = is_seen & (kinds == place)
            if its.any():
                spent_s = _spent_until(edges, began[its]) - _spent_until(
                    edges, began[its] + took[its]
                )
                found[name] = np.round(np.diff(spent_s) / np.diff(edges), 2).tolist()
        return found


def _spent_until(times: np.ndarray, since: np.ndarray) -> np.ndarray:
    """[times] seconds that have passed until each time, summed over all of `since` before it."""
    since = np.sort(since - times[0])
    counts = np.searchsorted(since, times - times[0])
    sums = np.r_[0.0, np.cumsum(since)]
    spent: np.ndarray = counts * (times - times[0]) - sums[counts]
    return spent


def _chosen(
    columns: _Columns,
    first: float,
    last: float,
    width: int,
    most: int,
) -> tuple[np.ndarray, int]:
    """Places of the spans that are drawn, about `most` at most; how many of the time are not."""
    _, numbers, (began, took) = columns
    seen = np.flatnonzero((began <= last) & (began + took >= first))
    seen = seen[np.argsort(-took[seen], kind="stable")]  # the longest of a cell comes first
    cell_s = max((last - first) / width, 1e-9)
    while True:
        is_wide = took[seen] >= cell_s
        narrow = seen[~is_wide]
        cells = ((began[narrow] - first) / cell_s).astype(np.int64) + 1
        cells += (numbers[_LANE][narrow].astype(np.int64) + 1) * (width + 2)
        _, places = np.unique(cells, return_index=True)
        chosen = np.sort(np.concatenate([seen[is_wide], narrow[places]]))
        if len(chosen) <= most or cell_s > last - first:
            return chosen, len(seen) - len(chosen)
        cell_s *= 2


def _as_columns(
    columns: _Columns,
    chosen: np.ndarray,
    first: float,
    used: dict[int, int],
) -> dict[str, list[Any]]:
    """Args: used: place of an about -> its number among those that are told."""
    kinds, numbers, times = (column[..., chosen] for column in columns)
    abouts = [used.setdefault(place, len(used)) for place in numbers[_ABOUT].tolist()]
    return {
        "kind": kinds.tolist(),
        "lane": numbers[_LANE].tolist(),
        "began": np.round(times[0] - first, 6).tolist(),
        "took": np.round(times[1], 6).tolist(),
        "first_version": numbers[_FIRST].tolist(),
        "last_version": numbers[_LAST].tolist(),
        "tokens": numbers[_TOKENS].tolist(),
        "about": abouts,
    }


def _places(names: Iterable[str], known: dict[str, int]) -> np.ndarray:
    """Place of each name among the known ones, which are more afterwards."""
    return np.array([known.setdefault(name, len(known)) for name in names], np.int32)


def _ordered(process: str) -> tuple[str, int]:
    """`train/2` comes before `train/10`."""
    role, _, index = process.partition("/")
    return role, int(index) if index.isdecimal() else 0
