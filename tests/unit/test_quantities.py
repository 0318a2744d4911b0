from __future__ import annotations

import math

import pytest

from areal_sc.quantities import percent, short_duration, short_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "nan"),
        (0.0, "0.000"),
        (0.4125, "0.412"),
        (0.00099996, "1.0e-3"),
        (1.24e-9, "1.2e-9"),
        (-1.5e-5, "-2e-5"),
        (-0.5, "-0.500"),
        (9.9996, "10.00"),
        (-12.345, "-12.35"),
        (999.96, "1000"),
        (-12345.0, "-12.3k"),
        (1234, "1.23k"),
        (123_456, "123k"),
        (1_234_567, "1.23M"),
    ],
)
def test_short_number(value: float | None, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.516, "0.52s"),
        (9.996, "10.0s"),
        (99.94, "99.9s"),
        (99.96, "1m40s"),
        (3599.6, "1h00m"),
        (43_380, "12h03m"),
        (9 * 86_400 + 4 * 3600, "9d04h"),
    ],
)
def test_short_duration(seconds: float | None, text: str) -> None:
    assert short_duration(seconds) == text


def test_short_texts_keep_to_their_columns() -> None:
    magnitudes = [mantissa * 10.0**power for power in range(-6, 17) for mantissa in (1, 9.9996, 5)]
    for value in magnitudes:
        assert len(short_number(value)) <= 6, value
        assert len(short_number(-value)) <= 6, value
        if value < 3e6:  # a month
            assert len(short_duration(value)) <= 6, value


def test_percent() -> None:
    assert [percent(s) for s in (0, 1e-6, 0.0234, 0.0996, 0.5, 1)] == [
        "0%",
        "0.1%",
        "2.3%",
        "10%",
        "50%",
        "100%",
    ]
