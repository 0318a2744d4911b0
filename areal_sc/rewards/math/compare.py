"""Whether two answers are equal. Imports sympy and math-verify when they are first needed.

Numbers that are written out are compared as exact fractions, and everything else by math-verify,
to 60 digits and without its own time limits (signal.alarm): the reward's process is killed.
"""

from __future__ import annotations

import logging
import math
import re
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from areal_sc.rewards.math.answer import Answer

if TYPE_CHECKING:
    import sympy

logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time limits are off

MIN_ROUNDED_DIGITS = 6
"""A decimal is taken for a number that it rounds, as 0.333333 for 1/3, from so many digits on."""

MAX_DIGITS = 20_000
"""Powers and factorials with more digits are not computed: 9^(9^9) equals only itself."""

_EITHER = ("any", "rounded")
_LETTERS = re.compile(r"\s*[A-Za-z](?:\s*[-+*/]\s*[A-Za-z])+\s*")
"""What m + n = 9 gives a value of; 2x = 9 is an equation to be solved."""

_PRECISION = 40
_EQUAL_DIGITS = 60
_NUMBER = re.compile(r"[-+]?[\d./]+", re.ASCII)
_DECIMAL = re.compile(r"\d*\.\d+|\d+\.")
_SET = re.compile(r"[<>\u2264\u2265\u222a\u2229]|\\(?:[lg]e|mathbb|cup|cap|setminus)")
_UNPARSED = re.compile(
    r"[A-Za-z]\s*(?:\\(?:cup|cap|setminus)(?![A-Za-z])|[\u222a\u2229])|'|\d:[0-5]\d(?!\d)"
    r"|\\(?:equiv|pmod|bmod|sim|cong|perp|parallel|subset|subseteq|mid|to|implies|land|lor|neg"
    r"|lnot|overline|prime)(?![A-Za-z])"
)
"""Sets of letters, relations, times of day: the library refuses them; each equals only itself."""


def are_equal(gold: Answer, given: Answer) -> bool:
    """Whether the answer given is the reference answer. Not symmetric: units may be left out."""
    if gold == given:
        return True
    if given.kind == "rounded" and not _is_near(*(item.latex for item in given.items)):
        return False
    if gold.kind in _EITHER:
        return any(are_equal(item, given) for item in gold.items)
    if given.kind in _EITHER:
        return any(are_equal(gold, item) for item in given.items)
    if given.kind == "=" and gold.kind != "=" and not gold.name:
        left, _, right = given.latex.rpartition("=")
        has_value = _LETTERS.fullmatch(left) or ("=" not in left and _are_equal_values(left, right))
        return bool(has_value) and are_equal(gold, Answer(right.strip()))
    if "=" in (gold.kind, given.kind) or (gold.name and given.name and gold.name != given.name):
        return _are_one_equation(gold, given)
    if not gold.items and not given.items:
        return _are_equal_quantities(gold, given)
    if not gold.items or not given.items:
        group, value = (gold, given) if gold.items else (given, gold)
        is_set = group.kind != "list" and _SET.search(value.latex)
        return bool(is_set) and _verify(_set(gold), _set(given))
    if len(gold.items) != len(given.items):
        return False
    is_range = gold.kind != given.kind and _SET.search(gold.latex)  # x > 1 or, and x < 2
    if {gold.kind, given.kind} <= {"list", "or", "{}"} and not is_range:
        return all(_count(item, gold) == _count(item, given) for item in gold.items)
    if {gold.kind, given.kind} == {"list", "()"}:
        gold, given = map(_by_names, (gold, given))
    return gold.kind == given.kind and all(map(are_equal, gold.items, given.items))


def _by_names(answer: Answer) -> Answer:
    """The tuple (2, -1) of the list x = 2, y = -1; any other answer as it is."""
    items = sorted(answer.items, key=lambda item: item.name)
    names = {item.name for item in items}
    if "" in names or len(names) < len(items):
        return answer
    return Answer(answer.latex, "()", tuple(replace(item, name="") for item in items))


def _set(answer: Answer) -> sympy.Basic:
    """An interval, an inequality, or the union of `x < 1 or x > 2`."""
    from sympy import Union

    if answer.kind == "or":
        return Union(*(parsed(item.latex).as_set() for item in answer.items))
    return parsed(answer.latex)


def _count(item: Answer, group: Answer) -> int:
    return sum(are_equal(item, other) for other in group.items)


def is_parsable(answer: Answer) -> bool:
    """Whether all parts of it are mathematics that the library takes."""
    if answer.items:
        return all(map(is_parsable, answer.items))
    try:
        return _written_number(answer.latex) is not None or parsed(answer.latex) is not None
    except ValueError:
        return False


def warm_up() -> None:
    """Imports the libraries, and lets the parser build its tables: seconds at the first time."""
    for latex in (r"\frac{\sqrt{2}}{2}", r"x^{2} + 2x - 1", r"1 < x < 2", r"2\cdot10^{-3}"):
        _are_equal_values(latex, f"{latex} + 0")


def library_verdict(gold: str, completion: str) -> float:
    """math-verify's own verdict on two texts, without its time limits."""
    import math_verify

    try:
        texts = (math_verify.parse(text, parsing_timeout=None) for text in (gold, completion))
        return float(math_verify.verify(*texts, timeout_seconds=None))
    except Exception:  # sympy raises whatever it likes over what a model writes
        return 0.0


@lru_cache(maxsize=256)
def parsed(latex: str) -> sympy.Basic:
    """The expression, not evaluated.

    Raises: ValueError: the library does not take it.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from latex2sympy2_extended.math_normalization import NormalizationConfig
    from sympy import I, Symbol, sympify
    from sympy.core.symbol import Str

    if _UNPARSED.search(latex):
        return Str(re.sub(r"\s", "", latex))
    try:
        parsed_latex = latex2sympy(
            _DECIMAL.sub(lambda match: f"({Fraction(match.group().rstrip('.'))})", latex),
            is_real=True,
            normalization_config=NormalizationConfig(
                basic_latex=False, malformed_operators=True, boxed="none"
            ),
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
        return sympify(parsed_latex).subs(Symbol("i", real=True), I)
    except Exception as error:  # the parser raises whatever it likes
        raise ValueError(f"{latex!r}: {type(error).__name__}") from error


def _are_one_equation(gold: Answer, given: Answer) -> bool:
    """Whether lhs - rhs of both are the same but for a factor: y = 2x + 3, and 2x - y + 3 = 0."""
    import sympy

    if not all(answer.name or answer.kind == "=" for answer in (gold, given)):
        return False
    sides = [parsed(f"{a.name} = {a.latex}" if a.name else a.latex) for a in (gold, given)]
    if not all(isinstance(side, sympy.Eq) for side in sides):
        return False
    one, other = (side.lhs - side.rhs for side in sides)
    if max(_num_digits(one), _num_digits(other)) > MAX_DIGITS or not one.free_symbols:
        return False
    factor = sympy.simplify(one / other)
    return bool(factor.is_number and factor.is_finite and factor.is_nonzero)


def _are_equal_quantities(gold: Answer, given: Answer) -> bool:
    units = {gold.unit, given.unit}
    if len(units) == 2 and ("" not in units or any(unit.startswith("_") for unit in units)):
        return False  # a base is not left out as a unit is: 10 in base 2 is not 10
    if units != {"", "%"}:
        return _are_equal_values(gold.latex, given.latex)
    share, bare = (gold, given) if gold.unit == "%" else (given, gold)
    if _are_equal_values(rf"\frac{{{share.latex}}}{{100}}", bare.latex):
        return True
    # up to 1 a bare number is a share, above it may be a count of percent: 50 is 50 %, 0.5 is too
    count = _written_number(bare.latex)
    return count is not None and abs(count) > 1 and _are_equal_values(share.latex, bare.latex)


def _are_equal_values(gold: str, given: str) -> bool:
    if gold == given:
        return True
    numbers = _written_number(gold), _written_number(given)
    if None not in numbers:
        is_equal = numbers[0] == numbers[1]
    else:
        one, other = parsed(gold), parsed(given)
        if max(_num_digits(one), _num_digits(other)) > MAX_DIGITS:
            return bool(one == other)
        is_equal = one.is_number == other.is_number and _verify(one, other)
    if is_equal or ("." in gold and "." in given):
        return is_equal
    return _rounds_to(gold, given) or _rounds_to(given, gold)


def _written_number(latex: str) -> Fraction | None:
    """Value of an integer, a decimal or a fraction of integers; None of everything else."""
    plain = latex.replace(" ", "")
    try:
        return Fraction(plain) if _NUMBER.fullmatch(plain) else None
    except (ValueError, ZeroDivisionError):
        return None


def _rounds_to(exact: str, decimal: str) -> bool:
    """Whether this is a decimal with digits enough, and the value rounded to them or cut off."""
    digits = re.sub(r"\D", "", decimal).lstrip("0")
    return "." in decimal and len(digits) >= MIN_ROUNDED_DIGITS and _is_near(exact, decimal)


def _is_near(exact: str, decimal: str) -> bool:
    """Whether the value is the decimal when it is rounded to as many places, or cut off."""
    from sympy import Expr, Float

    written, places = _written_number(decimal), len(decimal.partition(".")[2])
    expression = parsed(exact)
    value = expression.evalf(_PRECISION) if isinstance(expression, Expr) else None
    if not written or not isinstance(value, Float):
        return False
    excess = (value / written - 1) * abs(written) * 10**places
    return bool(-1 <= 2 * excess < 2)


def _verify(gold: Any, given: Any) -> bool:
    """The library's comparison of constants, expressions with variables, sets, and matrices."""
    import math_verify

    digits = {"float_rounding": _EQUAL_DIGITS, "numeric_precision": _EQUAL_DIGITS}
    options = {"allow_set_relation_comp": True, "timeout_seconds": None}
    return bool(math_verify.verify(gold, given, **digits, **options))


def _num_digits(expression: Any) -> float:
    """An upper bound of the digits of all numbers in it, without computing them."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return math.log10(max(abs(expression.p), expression.q))
    parts = [_num_digits(part) for part in expression.args]
    growing = sympy.Pow | sympy.exp | sympy.factorial | sympy.factorial2 | sympy.gamma
    if isinstance(expression, growing):
        return max(parts[-1], max(1.0, parts[0]) * 10 ** min(parts[-1], 300))
    return sum(parts)
