"""Rows that begin with the same tokens, as trees in which each shared run of tokens is once.

    rows                 runs
    1 2 3 4              1 2 3 ┬ 4
    1 2 3 5 6 7                └ 5 6 ┬ 7
    1 2 3 5 6 8 9                    └ 8 9
    2 3                  2 3

A causal model computes the same of tokens behind which nothing differs: a token of a run sees the
runs on the way from the root, and the tokens before it in its own run. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[Any]
"""[T] token ids."""


@dataclass(frozen=True)
class Forest:
    """Where the tokens of rows are computed; runs lie one after the other, parents first.

    Attributes:
        lengths: tokens of each run, >= 1.
        parents: the run before each one, -1 for those that begin rows.
        token_index: [C] int64, of each computed token: one of the rows' T tokens that it stands
            for.
        computed_index: [T] int64, of each token of the rows: the computed one.
    """

    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    token_index: NDArray[np.int64]
    computed_index: NDArray[np.int64]

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed."""
        return len(self.token_index)


@dataclass(frozen=True)
class _SharedRun:
    """Tokens `begin` to `end` of each of some rows, which are the same in all of them."""

    rows: list[int]
    begin: int
    end: int
    parent: int


def share_prefixes(units: Sequence[Sequence[Row]], min_saved: float) -> Forest | None:
    """The forest of the rows of all units, in their order; None if nothing is shared in it.

    Args:
        units: rows that may share; each unit has as many tokens as it has alone.
        min_saved: a run is shared if that saves at least so many tokens, >= 1.
    """
    runs = list[_SharedRun]()
    starts = [0]
    for rows in units:
        first_run, first_row = len(runs), len(starts) - 1
        for run in _find_runs(rows, min_saved):
            numbers = [first_row + row for row in run.rows]
            parent = run.parent + first_run if run.parent >= 0 else -1
            runs.append(_SharedRun(numbers, run.begin, run.end, parent))
        for row in rows:
            starts.append(starts[-1] + len(row))
    lengths = [run.end - run.begin for run in runs]
    if sum(lengths) == starts[-1]:
        return None
    token_index = np.empty(sum(lengths), np.int64)
    computed_index = np.empty(starts[-1], np.int64)
    places = accumulate(lengths, initial=0)
    for run, place, length in zip(runs, places, lengths, strict=False):
        computed = np.arange(place, place + length)
        for number in run.rows:
            computed_index[starts[number] + run.begin : starts[number] + run.end] = computed
        token_index[computed] = computed - place + starts[run.rows[0]] + run.begin
    return Forest(tuple(lengths), tuple(run.parent for run in runs), token_index, computed_index)


def sharing_rows(rows: Sequence[Row], min_saved: float) -> list[list[int]]:
    """The rows of each tree, those beside each other that have most in common."""
    trees: list[list[int]] = []
    seen = set[int]()
    for run in _find_runs(rows, min_saved):
        if run.parent < 0:
            trees.append([])
        trees[-1] += [row for row in run.rows if row not in seen]
        seen.update(run.rows)
    return trees


def _find_runs(rows: Sequence[Row], min_saved: float) -> list[_SharedRun]:
    """In depth-first order. Rows that begin alike are neighbours once all are sorted."""
    in_bytes = [row.astype(">u4").tobytes() for row in rows]  # of which the order is that of tokens
    order = sorted(range(len(rows)), key=in_bytes.__getitem__)
    common = [_num_common(rows[one], rows[other]) for one, other in pairwise(order)]
    runs = list[_SharedRun]()
    # (first, end) of sorted rows whose tokens before `begin` are the runs until `parent`
    waiting = [(0, len(rows), 0, -1)] if rows else []
    while waiting:
        first, end, begin, parent = waiting.pop()
        reach = min(common[first : end - 1], default=len(rows[order[first]]))
        cuts = [first, *(n for n in range(first + 1, end) if common[n - 1] == reach), end]
        is_leaf = end - first == 1
        if begin < reach and (is_leaf or (len(cuts) - 2) * (reach - begin) >= min_saved):
            runs.append(_SharedRun(order[first:end], begin, reach, parent))
            begin, parent = reach, len(runs) - 1
        if not is_leaf:
            waiting += [(*piece, begin, parent) for piece in reversed(list(pairwise(cuts)))]
    return runs


def _num_common(one: Row, other: Row) -> int:
    """How many first tokens are the same."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length
