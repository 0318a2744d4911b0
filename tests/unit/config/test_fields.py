from __future__ import annotations

from dataclasses import dataclass

import pytest

from areal_sc.config.fields import (
    RANGE,
    Range,
    check_ranges,
    is_section,
    schema_fields,
    setting,
)
from areal_sc.config.loading.settings_help import meaning_of
from areal_sc.config.schema import GRPOConfig
from areal_sc.errors import ConfigError


def test_every_setting_has_a_meaning_and_every_number_a_range() -> None:
    for path, found, annotation in schema_fields(GRPOConfig):
        assert meaning_of(found, annotation), path
        assert (RANGE in found.metadata) == (annotation in (int, float, int | None)), path
        assert is_section(annotation) or "\n" not in found.metadata["meaning"], path


def test_range_ends() -> None:
    inf, nan = float("inf"), float("nan")
    closed = Range(ge=0, le=1)
    assert [x in closed for x in (-0.1, 0, 1, 1.1, inf, nan)] == [
        False, True, True, False, False, False,
    ]  # fmt: skip
    half_open = Range(gt=0, lt=1)
    assert [x in half_open for x in (0, 0.5, 1)] == [False, True, False]
    assert inf in Range(ge=0, infinite=True)
    assert inf not in Range(ge=0)
    assert str(closed) == "at least 0 and at most 1"
    assert str(half_open) == "above 0 and below 1"


def test_ranges_of_a_schema_of_ones_own_hold() -> None:
    @dataclass
    class Game:
        size: int = setting(3, "fields a side", ge=2)
        fields: list[int] = setting(list)

    check_ranges(Game())
    check_ranges(Game(size=2**63 - 1, fields=[-(2**63) + 1]))
    for wrong in (Game(size=2**63), Game(fields=[0, 2**64]), Game(fields=[-(2**70)])):
        with pytest.raises(ConfigError, match=r"expected an integer below 2\^63, got one of"):
            check_ranges(wrong)
    with pytest.raises(ConfigError, match=r"^size: expected an integer at least 2, got 1$"):
        check_ranges(Game(size=1))
