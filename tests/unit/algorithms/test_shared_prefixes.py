"""Rows that begin alike, as trees; the reference is the set of all their beginnings."""

from __future__ import annotations

import random

import numpy as np
import pytest

from areal_sc.algorithms.shared_prefixes import Row, share_prefixes, sharing_rows


def random_rows(seed: int) -> list[Row]:
    """Of few tokens: some are equal, some begin others, and they part again and again."""
    chance = random.Random(seed)
    return [
        np.array([chance.randrange(chance.choice([1, 2, 3])) for _ in range(chance.randint(1, 8))])
        for _ in range(chance.randint(1, 8))
    ]


@pytest.mark.parametrize("seed", range(200))
def test_each_beginning_is_computed_once(seed: int) -> None:
    rows = random_rows(seed)
    tokens = np.concatenate(rows)
    num_beginnings = len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    forest = share_prefixes([rows], 1)
    if forest is None:
        assert num_beginnings == len(tokens)
        return
    assert forest.num_tokens == sum(forest.lengths) == num_beginnings
    assert tokens[forest.token_index][forest.computed_index].tolist() == tokens.tolist()
    starts = np.cumsum([0, *forest.lengths])
    run_of = np.repeat(np.arange(len(forest.lengths)), forest.lengths)
    for row, first in zip(rows, np.cumsum([0, *map(len, rows)]), strict=False):
        computed = forest.computed_index[first : first + len(row)].tolist()
        last_run, path = int(run_of[computed[-1]]), list[int]()
        while last_run >= 0:
            path = [*range(starts[last_run], starts[last_run + 1]), *path]
            last_run = forest.parents[last_run]
        assert path[: len(row)] == computed
        assert len(path) == len(row)  # no run goes on behind a row's end


def test_a_run_that_saves_little_is_computed_for_each_row() -> None:
    rows = [np.array(row) for row in ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [1, 7], [1, 8])]
    saving_one, saving_three = share_prefixes([rows], 1), share_prefixes([rows], 3)
    assert saving_one is not None
    assert saving_one.lengths == (1, 3, 1, 1, 1, 1)
    assert saving_one.parents == (-1, 0, 1, 1, 0, 0)
    # three rows do without the first token of the fourth, but two share no three tokens behind it
    assert saving_three is not None
    assert saving_three.lengths == (4, 1, 1, 2, 2)
    assert saving_three.parents == (-1, 0, 0, -1, -1)
    assert share_prefixes([rows], 5) is None
    assert share_prefixes([rows[1:2]], 1) is None
    assert share_prefixes([[]], 1) is None
    assert share_prefixes([], 1) is None


@pytest.mark.parametrize("min_saved", [1, 2, 5])
def test_rows_of_a_tree_are_neighbours(min_saved: int) -> None:
    for seed in range(100):
        rows = random_rows(seed)
        trees = sharing_rows(rows, min_saved)
        assert sorted(row for tree in trees for row in tree) == list(range(len(rows)))
        together = share_prefixes([rows], min_saved)
        in_units = share_prefixes([[rows[row] for row in tree] for tree in trees], min_saved)
        assert (in_units and in_units.lengths) == (together and together.lengths)
        if together is None:
            assert all(len(tree) == 1 for tree in trees)
            continue
        apart = [share_prefixes([[rows[row] for row in tree]], min_saved) for tree in trees]
        lengths = [sum(len(rows[row]) for row in tree) for tree in trees]
        each = [n if it is None else it.num_tokens for n, it in zip(lengths, apart, strict=True)]
        assert sum(each) == together.num_tokens


def test_units_share_nothing_with_each_other() -> None:
    rows = [np.array(row) for row in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 6], [1, 2, 3, 7])]
    forest = share_prefixes([rows[:2], rows[2:]], 1)
    assert forest is not None
    assert forest.lengths == (3, 1, 1, 3, 1, 1)
    assert forest.parents == (-1, 0, 0, -1, 3, 3)
    tokens = np.concatenate(rows)
    assert tokens[forest.token_index][forest.computed_index].tolist() == tokens.tolist()
    assert share_prefixes([[row] for row in rows], 1) is None
