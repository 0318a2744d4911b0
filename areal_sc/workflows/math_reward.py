"""Rewards for questions with a known answer: 1 where the completion has it, else 0."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

RELATIVE_TOLERANCE = 1e-6

_UNSIGNED = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
# a minus right behind a word, a number or a bracket subtracts; it is no sign
_SIGN = r"(?:(?<![\w)\]}])[-+]\s?)?"
_NUMBER = re.compile(rf"({_SIGN}{_UNSIGNED})(?:\s?/\s?({_UNSIGNED}))?", re.ASCII)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_MINUS_SIGNS = str.maketrans({"\N{MINUS SIGN}": "-", "\N{EN DASH}": "-"})


def exact_match(prompt: Mapping[str, Any], completion: str) -> float:
    """1.0 where the completion is `prompt["answer"]`, white space around it aside."""
    return float(completion.strip() == str(prompt["answer"]).strip())


def numeric_match(prompt: Mapping[str, Any], completion: str) -> float:
    """1.0 where the completion's final number equals that of `prompt["answer"]`.

    Final is what stands behind the last `####`, else in the last `\\boxed{}`, else the last
    number. `1,234.5`, `-3/4`, `\\frac{3}{4}` and `2e-3` are numbers. Equal is a relative
    difference of at most 1e-6.

    Raises: ValueError: the answer has no number.
    """
    expected = final_number(str(prompt["answer"]))
    if expected is None:
        raise ValueError(f"the row's answer {prompt['answer']!r} has no number")
    given = final_number(completion)
    if given is None:
        return 0.0
    return float(math.isclose(given, expected, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12))


def final_number(text: str) -> float | None:
    """The number that the text ends up with, None where there is none."""
    text = text.translate(_MINUS_SIGNS)
    _, marker, behind = text.rpartition("####")
    if marker:
        numbers = _numbers(behind)
        return numbers[0] if numbers else None
    boxed = _last_boxed(text)
    numbers = _numbers(text if boxed is None else boxed)
    return numbers[-1] if numbers else None


def _numbers(text: str) -> list[float]:
    numbers = []
    for numerator, denominator in _NUMBER.findall(_LATEX_FRACTION.sub(r" \1/\2 ", text)):
        number = _to_float(numerator)
        if denominator:
            divisor = _to_float(denominator)
            number = number / divisor if divisor else math.nan
        numbers.append(number)
    return numbers


def _to_float(digits: str) -> float:
    return float(digits.replace(",", "").replace(" ", ""))


def _last_boxed(text: str) -> str | None:
    """Content of the last `\\boxed{...}`, braces within it included."""
    _, marker, behind = text.rpartition("\\boxed{")
    if not marker:
        return None
    depth = 1
    for position, character in enumerate(behind):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return behind[:position]
    return behind
