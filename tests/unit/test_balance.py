"""Groups that are spread over ranks; what a rank computes is counted from the rows themselves."""

from __future__ import annotations

import math
import random
from itertools import product
from statistics import fmean

import pytest

from areal_sc.balance import GroupRows, spread_groups


def draw_groups(seed: int, num_groups: int, prompt: int, answer: int) -> list[GroupRows]:
    """Groups of eight rows."""
    chance = random.Random(seed)

    def near(tokens: int) -> int:
        return round(tokens * math.exp(chance.gauss(0, 0.4)))

    groups = []
    for group in range(num_groups):
        rows = [(1 + near(answer), 8 * group + place) for place in range(8)]
        groups.append(GroupRows(group, near(prompt), sorted(rows, reverse=True)))
    return groups


def computed_tokens(groups: list[GroupRows], part: list[int]) -> int:
    """Each prompt once, and what is behind it."""
    chosen = [[tokens for tokens, row in group.rows if row in part] for group in groups]
    pairs = zip(groups, chosen, strict=True)
    return sum(group.prompt_tokens + sum(own) for group, own in pairs if own)


@pytest.mark.parametrize(("num_groups", "n"), [*product((1, 3, 16), (1, 2, 4))])
def test_every_row_is_in_one_share(num_groups: int, n: int) -> None:
    for seed in range(5):
        groups = draw_groups(seed, num_groups, 100, 50)
        parts = spread_groups(groups, n)
        assert len(parts) == n
        assert sorted(row for part in parts for row in part) == list(range(8 * num_groups))
        assert all(part == sorted(part) for part in parts)


@pytest.mark.parametrize(
    ("num_groups", "n", "most"), [(16, 2, 1.01), (16, 4, 1.05), (8, 2, 1.05), (4, 8, 2.7)]
)
def test_the_busiest_rank_computes_little_more_than_its_share(
    num_groups: int, n: int, most: float
) -> None:
    """8 answers of about 64 tokens behind 448. Of 4 groups on 8 ranks each prompt is needed twice,
    or more often; rows by themselves would be 4.6 of these shares."""
    ratios = []
    for seed in range(20):
        groups = draw_groups(seed, num_groups, 448, 64)
        loads = [computed_tokens(groups, part) for part in spread_groups(groups, n)]
        once = sum(group.num_tokens for group in groups)
        ratios.append(max(loads) * n / once)
    assert fmean(ratios) < most


def test_answers_that_share_nothing_are_spread_by_their_lengths() -> None:
    for seed in range(20):
        groups = draw_groups(seed, 3, 0, 50)
        loads = [computed_tokens(groups, part) for part in spread_groups(groups, 2)]
        assert max(loads) - min(loads) <= max(
            tokens for group in groups for tokens, _ in group.rows
        )


def test_a_row_that_is_longer_than_its_share_has_a_rank_of_its_own() -> None:
    groups = [
        GroupRows(group, 20, [(2, 3 * group + row) for row in range(3)]) for group in range(3)
    ]
    parts = spread_groups([*groups, GroupRows(3, 0, [(60, 9)])], 3)
    assert sorted(map(len, parts)) == [1, 3, 6]


def test_rows_on_which_nothing_is_computed_are_spread_too() -> None:
    nothing = [GroupRows(group, 0, [(0, group)]) for group in range(4)]
    assert sorted(map(len, spread_groups(nothing, 2))) == [2, 2]
