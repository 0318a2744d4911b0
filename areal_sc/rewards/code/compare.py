"""Whether a program's output is the expected one, by the rules of judges. No torch.

Both are plain data, and no code of the candidate's runs here: no object decides what it equals.
White space at the ends of lines and of the text does not count, nor how much stands between two
words. Numbers are compared as decimals, exactly; where the expected one is written with a point or
an exponent, to a tolerance, but whole numbers are near no other ones; `007` is a text. In values of
calls a tuple is a list, and truth values are no numbers.
"""

from __future__ import annotations

import json
import math
import re
import sys
from decimal import Decimal
from itertools import zip_longest
from typing import Any, Final

_NUMBER: Final = re.compile(
    r"[+-]?(?:\d{1,400}\.?\d{0,400}|\.\d{1,400})(?:[eE][+-]?\d{1,3})?", re.A
)
"""A number as outputs have it. Longer ones are compared as texts."""

_WHOLE: Final = re.compile(r"[+-]?\d+", re.A)
_PADDED: Final = re.compile(r"[+-]?0\d", re.A)


def same_output(given: bytes, expected: Any, tolerance: float, *, is_call: bool) -> bool:
    """Whether what was printed is the expected output.

    Args:
        expected: a text; of a call, the value, which was printed as JSON.
        tolerance: relative or absolute, whichever is larger; 0: floats are compared exactly, too.
    """
    if not is_call:
        return _same_text(given.decode(errors="replace"), expected, tolerance)
    try:
        value = json.loads(given, parse_int=whole_number)
        return _same_value(value, expected, tolerance)
    except (ValueError, OverflowError, RecursionError):  # no JSON; or too long or deep for a value
        return False


def whole_number(digits: str) -> int | Decimal:
    """The number, however long: of many digits Python makes no int, as that takes their square."""
    is_short = len(digits) <= sys.int_info.str_digits_check_threshold
    return int(digits) if is_short else Decimal(digits)


def _same_text(given: str, expected: str, tolerance: float) -> bool:
    lines = given.strip().split("\n"), expected.strip().split("\n")
    if len(lines[0]) != len(lines[1]):
        return False
    return all(
        one == other or _same_line(one.split(), other.split(), tolerance)
        for one, other in zip(*lines, strict=True)
    )


def _same_line(given: list[str], expected: list[str], tolerance: float) -> bool:
    return all(
        one == other
        or (one is not None and other is not None and _same_number(one, other, tolerance))
        for one, other in zip_longest(given, expected)
    )


def _same_number(given: str, expected: str, tolerance: float) -> bool:
    if not (_NUMBER.fullmatch(given) and _NUMBER.fullmatch(expected)):
        return False
    if _PADDED.match(expected):  # binary digits, or a code
        return False
    if Decimal(given) == Decimal(expected):
        return True
    return not _WHOLE.fullmatch(expected) and _is_close(
        given if _WHOLE.fullmatch(given) else float(given), float(expected), tolerance
    )


def _same_value(given: Any, expected: Any, tolerance: float) -> bool:
    match given, expected:
        case list(), list() | tuple():
            return len(given) == len(expected) and all(
                _same_value(one, other, tolerance)
                for one, other in zip(given, expected, strict=True)
            )
        case dict(), dict():
            return given.keys() == expected.keys() and all(
                _same_value(value, expected[key], tolerance) for key, value in given.items()
            )
        case bool(), _:
            return given is expected
        case int() | float(), float():
            return given == expected or _is_close(given, expected, tolerance)
    return given == expected and not isinstance(expected, bool)


def _is_close(given: float | str, expected: float, tolerance: float) -> bool:
    """Args: given: an int or a text: a whole number, which is near no other whole one."""
    if not isinstance(given, float) and expected.is_integer():
        return int(given) == expected
    numbers = float(given), expected
    return all(map(math.isfinite, numbers)) and math.isclose(
        *numbers, rel_tol=tolerance, abs_tol=tolerance
    )
