"""Units and other words behind a number."""

from __future__ import annotations

import re
from itertools import takewhile

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
    °c celsius, °f fahrenheit
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
_CURRENCY_BEHIND = re.compile(r"(?<=[\d})])\s*([€£¥¢])$")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?(\d+)\}?$")
_PER = re.compile(r"\s*/\s*(?=[A-Za-z])|(?<=[A-Za-z])\s+per\s+", re.IGNORECASE)
_POWER = re.compile(r"\b(sq|cu)(?:uare|bic)?\s+([A-Za-z]+)", re.IGNORECASE)
_GLUED = re.compile(r"(.*[\d})])(°?[A-Za-z][A-Za-z/]*(?:\^\{?-?\d\}?)?|°)")
_COMMAND = re.compile(r"\\(?:frac|cdot|times)")
_WORD = re.compile(r"(°?[A-Za-z]+|°|[$€£¥¢])(?:\^?\{?(-?\d)\}?)?")


def split_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """(`5`, ("m/s",)) of `5 meters per second`; the first part is empty where words change it.

    A word is a unit that is known, or one of three letters or more that stands apart. Other
    letters stay: they are variables.
    """
    if base := _BASE.search(text):
        return text[: base.start()], (f"base {base[1]}",)
    if currency := _CURRENCY_BEHIND.search(text):
        return text[: currency.start()], (currency[1],)
    unit: list[str] = []
    if currency := _CURRENCY.match(text):
        text, unit = currency[1] + text[currency.end() :], [currency[2]]
    text = _POWER.sub(lambda m: f"{m[2]}^{'2' if m[1].lower() == 'sq' else '3'}", text)
    tokens = _PER.sub("/", text).split()
    words: list[str] = []
    while len(tokens) > 1 and _is_unit_word(tokens[-1]):
        words.insert(0, tokens.pop())
    glued = _GLUED.fullmatch(tokens[-1]) if tokens else None
    if glued and (len(glued[2].strip("°")) != 1 or "°" in glued[2]) and _is_known(glued[2]):
        tokens[-1] = glued[1]
        words.insert(0, glued[2])
    if any(_CHANGING.fullmatch(word) for word in words):
        return "", ()
    core = " ".join(tokens)
    if any(len(word) == 1 for word in words) and re.search(r"[A-Za-z]", _COMMAND.sub("", core)):
        return text, ()  # 2 r h
    named = takewhile(lambda word: not _ENDING.fullmatch(word), words)
    return core, (*map(_short, named), *unit)


def _is_unit_word(token: str) -> bool:
    return bool(
        _ENDING.fullmatch(token)
        or _CHANGING.fullmatch(token)
        or _is_known(token)
        or re.fullmatch(r"[A-Za-z][A-Za-z'/-]{2,}(?:\^\d)?\)?", token)
    )


def _is_known(token: str) -> bool:
    matches = [_WORD.fullmatch(part) for part in token.split("/")]
    return all(match is not None and _singular(match[1]) in _SHORT for match in matches)


def _singular(word: str) -> str:
    lower = word.lower()
    return lower if lower in _SHORT or len(lower) < 3 else lower.removesuffix("s")


def _short(word: str) -> str:
    """`km/h^2` of `kilometers/hours^2`."""
    parts = (_WORD.fullmatch(part) or (part, part, "") for part in word.split("/"))
    names = ((_singular(part[1]), part[2]) for part in parts)
    return "/".join(
        _SHORT.get(name, name) + (f"^{power}" if power else "") for name, power in names
    )
