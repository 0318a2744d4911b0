"""When a judge takes an output for the expected one."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from areal_sc.rewards.code.compare import same_output

TOLERANCE = 1e-6


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("YES\n", "YES"),
        ("YES", "\nYES\n\n"),
        ("1 2 3 \r\n4\r\n", "1 2 3\n4\n"),
        ("  1   2\t3", "1 2 3"),
        ("a\n\nb", "a\n\nb\n"),
        ("5", "5.0"),
        ("5.0", "5"),
        ("+5 -0", "5 0"),
        ("0.333333", "0.3333333333"),
        ("1000000.4", "1000000.1"),  # relative
        ("1e-9", "0.0"),  # absolute
        ("1E3", "1000.0"),
        (".5", "0.5"),
        ("90071992547409930001.0", "90071992547409930001"),
        ("Case 1: 0.5000001", "Case 1: 0.5"),
        ("9" * 5000, "9" * 5000),
        ("日本", "日本"),
        ("0011", "0011"),
        ("1000000", "1000000.0"),
    ],
)
def test_these_texts_are_the_same(given: str, expected: str) -> None:
    assert same_output(given.encode(), expected, TOLERANCE, is_call=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("", "YES"),
        ("yes", "YES"),
        ("YES YES", "YES"),
        ("1 2\n3", "1 2 3"),  # lines count
        ("1\n2", "1\n\n2"),
        ("1 2", "1 2 3"),
        ("1 2 3", "1 2"),
        ("12", "1 2"),
        ("5.1", "5"),
        ("11", "0011"),  # binary digits, or a code
        ("1000001", "1000000.0"),  # a whole number is near no other one
        ("9e999", "1e400"),  # both are infinite as floats
        ("5.0000001", "5"),  # an integer is exact
        ("90071992547409930000.0", "90071992547409930001"),  # equal as float64
        ("0.33333", "0.3333333333"),
        ("nan", "0.5"),
        ("NaN NaN", "1.0 2.0"),
        ("inf", "1e999"),
        ("1_0", "10"),
        ("\N{ARABIC-INDIC DIGIT FIVE}", "5"),
        ("9" * 5000, "9" * 4999 + "8"),
        ("0x10", "16"),
    ],
)
def test_these_texts_are_not(given: str, expected: str) -> None:
    assert not same_output(given.encode(), expected, TOLERANCE, is_call=False)


def test_without_a_tolerance_decimals_are_exact() -> None:
    assert same_output(b"0.50", "0.5", 0.0, is_call=False)
    assert not same_output(b"0.5000001", "0.5", 0.0, is_call=False)


@pytest.mark.parametrize("given", [b"\xff\xfe\x00", b"\x00", bytes(range(256)), b"\xed\xa0\x80"])
def test_bytes_that_are_no_text_are_wrong(given: bytes) -> None:
    assert not same_output(given, "5", TOLERANCE, is_call=False)
    assert not same_output(given, 5, TOLERANCE, is_call=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, 5),
        (5.0, 5),
        (0.3333333, 1 / 3),
        ([1, [2, 3]], [1, [2, 3]]),
        ([1, 2], (1, 2)),
        ({"a": [0.1 + 0.2]}, {"a": [0.3]}),
        ("x y", "x y"),
        (None, None),
        (True, True),
        ([], []),
        (10**30, 10**30),
    ],
)
def test_these_values_are_the_same(given: Any, expected: Any) -> None:
    assert same_output(json.dumps(given).encode(), expected, TOLERANCE, is_call=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, 6),
        (5.0000001, 5),
        ("5", 5),
        (5, "5"),
        ("x  y", "x y"),
        ([1, 2], [2, 1]),
        ([1, 2], [1, 2, 3]),
        ([1], 1),
        ({"a": 1}, {"a": 1, "b": 2}),
        (None, 0),
        ([], {}),
        (math.nan, 0.5),
        (math.inf, 0.5),
        (10**400, 0.5),
        (True, [True]),
    ],
)
def test_these_values_are_not(given: Any, expected: Any) -> None:
    assert not same_output(json.dumps(given).encode(), expected, TOLERANCE, is_call=True)


@pytest.mark.parametrize("given", [b"", b"5 5", b"{", b"9" * 5000, b"[" * 100_000, b"5 # right"])
def test_what_is_no_value_is_wrong(given: bytes) -> None:
    assert not same_output(given, 5, TOLERANCE, is_call=True)


def test_whole_numbers_of_any_length_are_exact() -> None:
    given, number = b"[" + b"9" * 100_000 + b", -1" + b"0" * 5000 + b"]", 10**100_000 - 1
    assert same_output(given, [number, -(10**5000)], TOLERANCE, is_call=True)
    assert not same_output(given, [number, -(10**5000) - 1], TOLERANCE, is_call=True)
    assert not same_output(given, [number - 1, -(10**5000)], TOLERANCE, is_call=True)
    assert not same_output(b"9" * 5000, 1e300, TOLERANCE, is_call=True)
    assert not same_output(b"9" * 5000, True, TOLERANCE, is_call=True)


def test_a_value_deeper_than_can_be_compared_is_wrong() -> None:
    deep: list[Any] = []
    for _ in range(20_000):
        deep = [deep]
    assert not same_output(b"[" * 900 + b"]" * 900, deep, TOLERANCE, is_call=True)


@pytest.mark.parametrize(
    ("given", "expected", "is_same"),
    [
        (True, 1, False),
        (1, True, False),
        (True, True, True),
        (1000001, 1000000.0, False),
        (1000000, 1000000.0, True),
        (0.5000000001, 0.5, True),
    ],
)
def test_truth_and_whole_numbers_are_exact(given: Any, expected: Any, is_same: bool) -> None:
    printed = json.dumps(given).encode()
    assert same_output(printed, expected, TOLERANCE, is_call=True) == is_same
