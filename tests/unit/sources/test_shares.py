"""Shares by weight, of any number of draws from the start."""

from __future__ import annotations

from itertools import islice

import pytest

from areal_sc.sources.shares import numbers_by_weight


@pytest.mark.parametrize("weights", [[1.0], [2.0, 1.0], [0.1, 0.7, 0.2], [5.0, 1.0, 1.0, 3.0]])
def test_each_source_has_its_share_all_the_time(weights: list[float]) -> None:
    drawn = list(islice(numbers_by_weight(weights), 200))
    for num_drawn in range(1, 201):
        for number, weight in enumerate(weights):
            share = num_drawn * weight / sum(weights)
            assert abs(drawn[:num_drawn].count(number) - share) <= max(1, len(weights) - 1)
