from __future__ import annotations

from areal_sc.config.keys import known_keys
from areal_sc.config.ranges import RANGES, Range
from areal_sc.config.schema import GRPOConfig


def test_every_number_of_the_schema_has_a_range() -> None:
    numbers = {key for key, kind in known_keys(GRPOConfig).items() if kind in (int, float)}
    assert set(RANGES) == numbers


def test_range_ends() -> None:
    inf, nan = float("inf"), float("nan")
    closed = Range(low=0, high=1)
    assert [x in closed for x in (-0.1, 0, 1, 1.1, inf, nan)] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    half_open = Range(low=0, high=1, low_open=True, high_open=True)
    assert [x in half_open for x in (0, 0.5, 1)] == [False, True, False]
    assert inf in Range(low=0, infinite=True)
    assert inf not in Range(low=0)
    assert str(closed) == "at least 0 and at most 1"
    assert str(half_open) == "above 0 and below 1"
