"""Whether two answers are equal. Imports sympy and math-verify when they are first needed.

Numbers that are written out are compared as exact fractions, other constants to 30 digits, and the
rest by math-verify, whose own time limits (signal.alarm) are off: the reward's process is killed.
"""

from __future__ import annotations

import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from areal_sc.workflows.math_answer import Answer, Equation, Group, Quantity

if TYPE_CHECKING:
    import sympy

MIN_ROUNDED_DIGITS = 6
"""A decimal is taken for a number that it rounds, as 0.333333 for 1/3, from so many digits on."""

MAX_DIGITS = 20_000
"""Powers and factorials with more digits are not computed: 9^(9^9) equals only itself."""

_PRECISION = 40
_EQUAL_DIGITS = 30
_FRACTION = re.compile(r"^([-+]?\s*)\\frac\{([-+]?\d+)\}\{(\d+)\}$", re.ASCII)
_NUMBER = re.compile(r"\(?[-+]?[\d./]+\)?", re.ASCII)
_SET = re.compile(r"[<>]|\\(?:[lg]e|mathbb|cup|cap|setminus)(?![A-Za-z])")
_LONE_DECIMAL = re.compile(r"(-?)(\d+)\.(\d*)", re.ASCII)
_BASE = re.compile(r"base \d")
_DECIMAL = re.compile(r"\d+\.\d*")
_UNPARSED = re.compile(
    r"[A-Za-z]\s*\\(?:cup|cap|setminus)(?![A-Za-z])|\\(?:equiv|pmod|bmod|sim|cong|perp|parallel"
    r"|subset|subseteq|mid|to|implies|land|lor|neg|lnot|not|overline|prime|[hv]?phantom|cancel)"
    r"(?![A-Za-z])|'|\d:[0-5]\d(?!\d)"
)
"""Sets of letters, relations, times of day: the library refuses them; each equals only itself."""

_MAX_DEPTH = 12
"""The library's parser takes seconds for brackets much deeper than this."""


def are_equal(gold: Answer, given: Answer) -> bool:
    """Whether the answer given is the reference answer. Not symmetric: units may be left out."""
    if gold == given:
        return True
    if isinstance(gold, Equation) or isinstance(given, Equation):
        return _are_equal_equations(gold, given)
    if isinstance(gold, Group) and isinstance(given, Group):
        return _are_equal_groups(gold, given)
    if isinstance(gold, Quantity) and isinstance(given, Quantity):
        return _are_equal_quantities(gold, given)
    group, value = (gold, given) if isinstance(gold, Group) else (given, gold)
    if isinstance(group, Group) and group.kind == "{}":
        return len(group.items) == 1 and are_equal(group.items[0], value)
    return _SET.search(value.latex) is not None and _verify(parsed(gold.latex), parsed(given.latex))


def check_parsable(answer: Answer) -> None:
    """Raises: ValueError: a part of it is no mathematics that the library takes."""
    if isinstance(answer, Group):
        for item in answer.items:
            check_parsable(item)
    elif isinstance(answer, Equation) and answer.value is not None:
        check_parsable(answer.value)
    elif exact_number(answer.latex) is None:
        parsed(answer.latex)


def warm_up() -> None:
    """Imports the libraries, and lets the parser build its tables: seconds at the first time."""
    for latex in (r"\frac{\sqrt{2}}{2}", r"x^{2} + 2x - 1", r"1 < x < 2", r"2\cdot10^{-3}"):
        _are_equal_values(latex, f"{latex} + 0")


def library_verdict(gold: str, completion: str) -> float:
    """math-verify's own verdict on two texts, without its time limits."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time limit is off
    try:
        reference, given = (
            math_verify.parse(text, parsing_timeout=None) for text in (gold, completion)
        )
        return float(math_verify.verify(reference, given, timeout_seconds=None))
    except Exception:  # sympy raises whatever it likes over what a model writes
        return 0.0


def exact_number(latex: str) -> Fraction | None:
    """Value of an integer, a decimal or a fraction of integers; None of everything else."""
    plain = _FRACTION.sub(r"\1\2/\3", latex).replace(" ", "")
    try:
        return Fraction(plain.strip("()")) if _NUMBER.fullmatch(plain) else None
    except (ValueError, ZeroDivisionError):
        return None


@lru_cache(maxsize=256)
def parsed(latex: str) -> sympy.Basic:
    """The expression, not evaluated.

    Raises: ValueError: the library does not take it.
    """
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy
    from sympy import Basic, I, MatrixBase, Symbol, nan, zoo
    from sympy.core.symbol import Str

    if _UNPARSED.search(latex):
        return Str(re.sub(r"\s", "", latex))
    if _depth(latex) > _MAX_DEPTH:
        raise ValueError(f"{latex!r}: brackets within brackets, more than {_MAX_DEPTH} deep")
    exact = _DECIMAL.sub(lambda match: _as_fraction(match.group()), latex)
    try:
        expression = latex2sympy(
            exact,
            is_real=True,
            normalization_config=None,
            conversion_config=ConversionConfig(
                interpret_as_mixed_fractions=False, lowercase_symbols=False
            ),
        )
    except Exception as error:  # the parser raises whatever it likes
        raise ValueError(f"{latex!r}: {type(error).__name__}") from error
    if isinstance(expression, MatrixBase):
        return expression.as_immutable()
    if isinstance(expression, Basic):
        expression = expression.subs(Symbol("i", real=True), I)
    if not isinstance(expression, Basic) or expression in (zoo, nan):
        raise ValueError(f"{latex!r}: {expression!r}")
    return expression


def _are_equal_equations(gold: Answer, given: Answer) -> bool:
    """Equations are equal to equations; and `x = 5` to 5, and `2 + x = x + 2` to `x + 2`."""
    if isinstance(gold, Equation) and isinstance(given, Equation):
        if gold.value is not None and given.value is not None and gold.name == given.name:
            return are_equal(gold.value, given.value)
        return _are_one_equation(gold.latex, given.latex)
    if isinstance(gold, Equation):
        return gold.value is not None and are_equal(gold.value, given)
    if isinstance(given, Equation) and given.value is not None:
        return are_equal(gold, given.value)
    left, _, right = given.latex.rpartition("=")
    return _are_equal_values(left, right) and are_equal(gold, Quantity(right.strip()))


def _are_equal_quantities(gold: Quantity, given: Quantity) -> bool:
    shared = min(len(gold.unit), len(given.unit))
    if gold.unit[:shared] != given.unit[:shared] or _BASE.match(" ".join(given.unit[shared:])):
        return False
    if gold.is_percent == given.is_percent:
        return _are_equal_values(gold.latex, given.latex)
    share, bare = (gold, given) if gold.is_percent else (given, gold)
    counts = exact_number(share.latex), exact_number(bare.latex)
    if counts[0] is None or counts[1] is None:
        return False
    # up to 1 a bare number is a share, above it may be a count of percent: 50 is 50 %, 0.5 is too
    return counts[0] / 100 == counts[1] or (abs(counts[1]) > 1 and counts[0] == counts[1])


def _are_equal_groups(gold: Group, given: Group) -> bool:
    kinds = {gold.kind, given.kind}
    if "{}" not in kinds and len(gold.items) != len(given.items):
        return False
    if kinds == {"list"}:
        return all(_count(item, gold) == _count(item, given) for item in gold.items)
    if kinds <= {"list", "{}"}:
        return all(_count(item, given) for item in gold.items) and all(
            _count(item, gold) for item in given.items
        )
    return gold.kind == given.kind and all(map(are_equal, gold.items, given.items))


def _count(item: Answer, group: Group) -> int:
    return sum(are_equal(item, candidate) for candidate in group.items)


def _are_equal_values(gold: str, given: str) -> bool:
    value: Any
    other_value: Any
    if gold == given:
        return True
    value, other_value = exact_number(gold), exact_number(given)
    if value is not None and other_value is not None:
        return value == other_value or _rounds_one(gold, given, value, other_value)
    import sympy

    one, other = parsed(gold), parsed(given)
    if one == other:
        return True
    if max(_num_digits(one), _num_digits(other)) > MAX_DIGITS:
        return False
    value, other_value = _constant(one), _constant(other)
    if value is None or other_value is None:
        return value is other_value and _verify(one, other)
    if not (value.is_finite and other_value.is_finite):
        return bool(value == other_value)
    if value.is_Rational and other_value.is_Rational:
        is_equal = value == other_value
    else:
        larger = max(abs(value), abs(other_value))
        is_equal = abs(value - other_value) <= larger * sympy.Rational(1, 10**_EQUAL_DIGITS)
    if is_equal:
        return True
    is_real = value.is_real and other_value.is_real
    return bool(is_real and _rounds_one(gold, given, value, other_value))


def _rounds_one(one: str, other: str, value: Any, other_value: Any) -> bool:
    """Whether one of them is a decimal that the other rounds to; two decimals are exact."""
    if _LONE_DECIMAL.fullmatch(one) and _LONE_DECIMAL.fullmatch(other):
        return False
    return _rounds_to(other_value, one) or _rounds_to(value, other)


def _rounds_to(value: Any, decimal: str) -> bool:
    """Whether the value, rounded or cut off, is this decimal, which has digits enough."""
    written = _LONE_DECIMAL.fullmatch(decimal)
    if written is None:
        return False
    sign, whole, places = written.groups()
    if len((whole + places).lstrip("0")) < MIN_ROUNDED_DIGITS:
        return False
    unit = Fraction(1, 10 ** len(places))
    excess = (-value if sign else value) - Fraction(f"{whole}.{places}0")
    return bool(-unit / 2 <= excess < unit)


def _are_one_equation(gold: str, given: str) -> bool:
    """Whether lhs - rhs of both are the same but for a factor: y = 2x + 3, and 2x - y + 3 = 0."""
    import sympy

    sides = [parsed(gold), parsed(given)]
    if not all(isinstance(side, sympy.Eq) for side in sides):
        return False
    one, other = (side.lhs - side.rhs for side in sides)
    if max(_num_digits(one), _num_digits(other)) > MAX_DIGITS or not one.free_symbols:
        return False
    factor = sympy.simplify(one / other)
    return bool(factor.is_number and factor.is_finite and factor.is_nonzero)


def _verify(gold: sympy.Basic, given: sympy.Basic) -> bool:
    """Expressions with variables, inequalities, matrices: the library's own comparison."""
    import math_verify
    from sympy import Eq, S

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # warns that its time limit is off
    if S.EmptySet in (gold, given) or isinstance(gold, Eq) or isinstance(given, Eq):
        return False  # to the library all equations without a solution are equal
    return bool(
        math_verify.verify(
            gold,
            given,
            float_rounding=_EQUAL_DIGITS,
            numeric_precision=_EQUAL_DIGITS,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def _num_digits(expression: Any) -> float:
    """An upper bound of the digits of all numbers in it, without computing them."""
    import sympy

    if isinstance(expression, sympy.Rational):
        return math.log10(max(abs(expression.p), expression.q))
    parts = [_num_digits(part) for part in expression.args]
    if any(part > MAX_DIGITS for part in parts):
        return math.inf
    if isinstance(expression, sympy.Pow | sympy.exp):
        base = parts[0] if isinstance(expression, sympy.Pow) else 0.44
        return max(parts[-1], base * 10 ** min(parts[-1], 300))
    if isinstance(expression, sympy.factorial | sympy.factorial2 | sympy.gamma):
        return 10 ** min(parts[0], 300) * max(1.0, parts[0])
    if isinstance(expression, sympy.Add):
        return max(parts) + math.log10(len(parts))
    return sum(parts)


def _constant(expression: sympy.Basic) -> Any:
    """Exact rational, or value to _PRECISION digits; None of an expression with variables."""
    import sympy

    if not isinstance(expression, sympy.Expr) or expression.free_symbols:
        return None
    value = expression.doit()
    value = value if value.is_Rational else sympy.N(value, _PRECISION)
    return value if value.is_number and value is not sympy.nan else None


def _depth(latex: str) -> int:
    steps = ({"{": 1, "(": 1, "}": -1, ")": -1}.get(character, 0) for character in latex)
    return max(accumulate(steps), default=0)


def _as_fraction(decimal: str) -> str:
    value = Fraction(decimal.rstrip("."))
    return f"(\\frac{{{value.numerator}}}{{{value.denominator}}})"
