"""What the words around a formula mean: units, explanations, denials.

The rules see prose alone: a formula in it is one character (`math_place.Prose`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import takewhile

from areal_sc.workflows.math_place import FORMULA, Prose

MULTIPLIERS = {
    "hundred": "100",
    "thousand": "1000",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "dozen": "12",
}

_UNITS = """
    m meter metre, cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre,
    in inch inche, ft foot feet, yd yard, mi mile, g gram gm, kg kilogram kilo, mg milligram,
    lb pound, oz ounce, l liter litre, ml milliliter millilitre, s second sec, min minute,
    h hour hr, day d, wk week, yr year, mi/h mph, km/h kmh kph, $ dollar usd, € euro eur, £ gbp,
    ¢ cent, ° degree deg, rad radian, n newton, j joule, w watt, v volt, hz hertz, pa pascal,
    °c celsius, °f fahrenheit, am, pm
"""
_SHORT = {name: row.split()[0] for row in _UNITS.split(",") for name in row.split()}
"""Every way to write a unit, in the singular -> the short one."""

_ENDING = re.compile(
    r"of|in|an?|each|every|for|to|at|altogether|total|the|on|per|more|less|fewer", re.IGNORECASE
)
"""What stands behind one of these is no unit: `5 apples in total`."""

_CHANGING = re.compile(
    r"over|plus|minus|times|divided|squared|cubed|factorial|point|or|and|than"
    r"|but|not|out|pairs?|mod|modulo|base|half|halves|(?:third|quarter|fourth|fifth|sixth|eighth"
    r"|tenth|hundredth)s?",
    re.IGNORECASE,
)
"""After one of these the number means something else: `5 squared`, `5 or more`."""

_CURRENCY = re.compile(r"^([-+]?)\s*([$€£¥¢])\s*(?=[-+\d.(\\])")
_CURRENCY_BEHIND = re.compile(r"(?<=[\d})])\s*([$€£¥¢])$")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?(\d+)\}?$")
_PER = re.compile(r"\s*/\s*(?=[A-Za-z])|(?<=[A-Za-z])\s+per\s+", re.IGNORECASE)
_POWER = re.compile(r"\b(sq|cu)(?:uare|bic)?\s+([A-Za-z]+)", re.IGNORECASE)
_GLUED = re.compile(r"(.*[\d})])(°?[A-Za-z][A-Za-z/]*(?:\^\{?-?\d\}?)?|°)")
_GLUED_UNIT = re.compile(r"°.*|..+")
_FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_COMMAND = re.compile(r"\\(?:frac|cdot|times|pi|sqrt)(?![A-Za-z])")
_OPEN_END = re.compile(r"(?:[-+*/^=<>(,]|\\(?:cdot|times|cup|cap))$")
_UNIT = re.compile(r"(°?[A-Za-z]+|°|[$€£¥¢])(?:\^?\{?(-?\d)\}?)?")

_LEAD = re.compile(
    r"(?:(?:the|is|are|equals|about|approximately|roughly)\b|an?(?=\s+(?!(?:and|or)\b)(?:\d|[A-Za-z]{2}))"
    r"|[:=,~*\s]|\\approx\b)+",
    re.IGNORECASE,
)
_REFUSED_BEHIND = re.compile(
    r"(?:\b(?:not|than|least|most|between|from|no|never|except|times|plus|minus|by|over|nor|below"
    r"|above|under|before|after|within|without|almost|nearly|twice|double|mod|step|question"
    r"|equation|exceeds|up to|instead of|maybe|perhaps|possibly|either)"
    r"|(?:\bnot|\bcannot|\bnever)(?:\s+[a-z]+){1,2}|n't(?:\s+[a-z]+){0,2}"
    r"|\b(?:all|any\w*|every\w*|nothing)(?:\s+[a-z]+)?\s+but"
    rf"|(?:%|[\d{FORMULA}]|\b(?:percent|out|half|thirds?|quarters?|multiples?|power|roots?|square"
    r"|cube|factors?|divisors?|minimum|maximum))\s+of),?$",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"[^,;:]*?\s(?:cannot|[a-z]+n't|(?:is|was|does|did|can)\s+not"
    r"|(?:is|was|seems|looks)\s+(?:[a-z]+\s+)?(?:wrong|incorrect|impossible|invalid|false))\b",
    re.IGNORECASE,
)
_MATH_WORD = re.compile(
    rf".*(?:\\[A-Za-z]|[=+^\d{FORMULA}\u00b0-\u00be\u2150-\u218b\u2200-\u22ff\u03c0\u00d7\u00f7]).*"
    r"|[-*/<>|&]|[b-zB-HJ-Z]|pi|sqrt.*"
)
_CONNECTORS = {"and", "or", "and,", "or,", ",", "to", "not", "between"}
_CLAUSE_END = re.compile(
    r"(?:[,;]\s*|\s+)\(?(?:because|since|as|so|which|when|where|that|if|after|but|not|for|at"
    r"|to\s+[a-z]{2,}|on|is|are|was|were|has|have|every|each|altogether|total|left|i\.e\.|hence"
    r"|thus|then|and so|instead|rather|remaining|more than|he|she|they|we|it)\b.*|;.*"
    r"|\s*(?:=>|\\implies).*",
    re.IGNORECASE | re.DOTALL,
)
_COPULA = re.compile(r"(?:\b(?:is|are|equals?|be|to)|[:=])\**$", re.IGNORECASE)


def without_lead(text: str) -> str:
    """The text without words that say nothing: "the", "is about"; `a` before `+` is no article."""
    lead = _LEAD.match(text)
    return text[lead.end() :].strip() if lead else text.strip()


def has_mathematics(sentence: Prose) -> bool:
    return any(_looks_like_math(word) for word in sentence.text.split())


def candidates(sentence: Prose, *, is_only: bool) -> Iterator[str]:
    """Parts of a sentence that may be its answer, with their formulas; the first readable counts.

    With `is_only` the sentence is an answer itself, and another expression in it is no answer.
    """
    yield sentence.with_formulas()
    expression = _last_expression(sentence.text, is_only=is_only)
    for part in [_first_clause(sentence.text)] * is_only + [expression, _first_clause(expression)]:
        yield sentence.part(part).with_formulas()


def _first_clause(text: str) -> str:
    """Without an explanation that follows: `5, because 2 + 3 = 5`."""
    clause = "" if _DENIED.match(text) else _CLAUSE_END.sub("", text, count=1)
    return clause if any(map(_looks_like_math, clause.split())) else ""


def _last_expression(sentence: str, *, is_only: bool) -> str:
    """The last run of words that look like mathematics, with what follows it.

    Empty where there is none, where words around it change its meaning (less than 5, 5 is wrong),
    and, with `is_only`, where there is another one, unless "is" stands between them.
    """
    words = sentence.split()
    is_math = [_looks_like_math(word) for word in words]
    if words and re.fullmatch(r"\W*[A-Z]\W*", words[-1]):  # the last word is no article
        is_math[-1] = True
    if True not in is_math:
        return ""
    end = len(words) - is_math[::-1].index(True)
    start = end - 1
    while start > 0 and (is_math[start - 1] or words[start - 1].lower() in _CONNECTORS):
        start -= 1
    while not is_math[start]:
        start += 1
    before, expression = " ".join(words[:start]), " ".join(words[start:])
    if _REFUSED_BEHIND.search(before) or _DENIED.match(expression):
        return ""
    return "" if is_only and any(is_math[:start]) and not _COPULA.search(before) else expression


def _looks_like_math(word: str) -> bool:
    return bool(_MATH_WORD.fullmatch(word.strip("*_`$.,;:!?()[]{}") or word))


def split_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """(`5`, ("m/s",)) of `5 meters per second`; the first part is empty where words change it.

    A word is a unit that is known, or one of three letters or more that stands apart. Other
    letters stay: they are variables.
    """
    if base := _BASE.search(text):
        return text[: base.start()], (f"base {base[1]}",)
    if currency := _CURRENCY_BEHIND.search(text):
        return text[: currency.start()], (_SHORT.get(currency[1], currency[1]),)
    unit: list[str] = []
    if currency := _CURRENCY.match(text):
        text, unit = currency[1] + text[currency.end() :], [currency[2]]
    named = _POWER.sub(lambda m: f"{m[2]}^{'2' if m[1].lower() == 'sq' else '3'}", text)
    tokens = _PER.sub("/", named).split()
    words: list[str] = []
    while len(tokens) > 1 and _is_unit_word(tokens[-1]):
        words.insert(0, tokens.pop())
    glued = _GLUED.fullmatch(tokens[-1]) if tokens else None
    is_angle = _FUNCTION.search(text) and text.endswith("°")  # of a sine
    if glued and not is_angle and _GLUED_UNIT.fullmatch(glued[2]) and _is_known(glued[2]):
        tokens[-1] = glued[1]
        words.insert(0, glued[2])
    core = " ".join(tokens)
    if any(map(_CHANGING.fullmatch, words)) or (words and re.fullmatch(r"[A-Za-z]{2,}", core)):
        return "", ()
    is_letter = any(len(word) == 1 and word != "°" for word in words)
    if _OPEN_END.search(core) or (is_letter and re.search(r"[A-Za-z+-]", _COMMAND.sub("", core))):
        return text, ()  # 2 + r, 2 r h
    short = map(_short, takewhile(lambda word: not _ENDING.fullmatch(word), words))
    return core, (*short, *unit)


def _is_unit_word(token: str) -> bool:
    return bool(
        _ENDING.fullmatch(token)
        or _CHANGING.fullmatch(token)
        or _is_known(token)
        or re.fullmatch(r"[A-Za-z][A-Za-z'/-]{2,}(?:\^\{?\d\}?)?\)?", token)
    )


def _is_known(token: str) -> bool:
    matches = [_UNIT.fullmatch(part) for part in token.split("/")]
    return all(match is not None and _singular(match[1]) in _SHORT for match in matches)


def _singular(word: str) -> str:
    lower = word.lower()
    return lower if lower in _SHORT or len(lower) < 3 else lower.removesuffix("s")


def _short(word: str) -> str:
    """`km/h^2` of `kilometers/hours^2`."""
    parts = (_UNIT.fullmatch(part) or (part, part, "") for part in word.split("/"))
    names = ((_singular(part[1]), part[2]) for part in parts)
    return "/".join(
        _SHORT.get(name, name) + (f"^{power}" if power else "") for name, power in names
    )
