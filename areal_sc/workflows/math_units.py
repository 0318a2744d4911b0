"""Units and other words behind a number."""

from __future__ import annotations

import re

MULTIPLIERS = {
    "hundred": "100",
    "thousand": "1000",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "dozen": "12",
}

_ALIASES = {
    alias: short
    for short, aliases in {
        "m": "meter metre",
        "cm": "centimeter centimetre",
        "mm": "millimeter millimetre",
        "km": "kilometer kilometre",
        "in": "inch inche",
        "ft": "foot feet",
        "yd": "yard",
        "mi": "mile",
        "g": "gram gm",
        "kg": "kilogram kilo",
        "mg": "milligram",
        "lb": "pound",
        "oz": "ounce",
        "l": "liter litre",
        "ml": "milliliter millilitre",
        "s": "second sec",
        "min": "minute",
        "h": "hour hr",
        "day": "d",
        "wk": "week",
        "yr": "year",
        "mi/h": "mph",
        "km/h": "kmh kph",
        "$": "dollar usd",
        "€": "euro eur",
        "£": "gbp",
        "¢": "cent",
        "°": "degree deg",
        "rad": "radian",
        "n": "newton",
        "j": "joule",
        "w": "watt",
        "v": "volt",
        "hz": "hertz",
        "pa": "pascal",
        "°c": "celsius",
        "°f": "fahrenheit",
    }.items()
    for alias in (short, *aliases.split())
}
_POWERS = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}
_ENDING = re.compile(r"of|in|an?|each|every|for|at|altogether|total|the|on", re.IGNORECASE)
_CHANGING = re.compile(
    r"to|over|plus|minus|times|divided|squared|cubed|factorial|point|or|and|more|less|fewer|than"
    r"|but|not|out|pairs?|mod|modulo|base|half|halves|(?:third|quarter|fourth|fifth|sixth|eighth"
    r"|tenth|hundredth)s?",
    re.IGNORECASE,
)
"""After one of these the number means something else: `5 squared`, `5 or more`."""

_CURRENCY = re.compile(r"^([-+]?)\s*([$€£¥¢])\s*(?=[-+\d.(\\])")
_CURRENCY_BEHIND = re.compile(r"(?<=[\d})])\s*([€£¥¢])$")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?(\d+)\}?$")
_GLUED = re.compile(r"(.*[\d})])(°?[A-Za-z][A-Za-z/]*(?:\^\{?-?\d\}?)?|°)")
_COMMAND = re.compile(r"\\(?:frac|cdot|times)")
_WORD = re.compile(r"(°?[A-Za-z]+|°|[$€£¥¢])(?:\^?\{?(-?\d)\}?)?")


def split_unit(text: str) -> tuple[str, tuple[str, ...]]:
    """(`5`, ("m/s",)) of `5 meters per second`; the first part is empty where words change it.

    A word is a unit that is known, or one of three letters or more that stands apart. Other
    letters stay: they are variables.
    """
    unit: list[str] = []
    if base := _BASE.search(text):
        return text[: base.start()], (f"base {base[1]}",)
    if currency := _CURRENCY.match(text):
        text, unit = currency[1] + text[currency.end() :], [currency[2]]
    elif currency := _CURRENCY_BEHIND.search(text):
        return text[: currency.start()], (currency[1],)
    tokens = re.sub(r"\s*/\s*(?=[A-Za-z])", "/", text).split()
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
    return core, (*_short(words), *unit)


def _is_unit_word(token: str) -> bool:
    if _ENDING.fullmatch(token) or _CHANGING.fullmatch(token):
        return True
    if token.lower() in (*_POWERS, "per"):
        return True
    return _is_known(token) or bool(re.fullmatch(r"[A-Za-z][A-Za-z'-]{2,}\)?", token))


def _is_known(token: str) -> bool:
    parts = token.split("/")
    matches = [_WORD.fullmatch(part) for part in parts]
    return all(match is not None and _singular(match[1]) in _ALIASES for match in matches)


def _singular(word: str) -> str:
    lower = word.lower()
    if lower in _ALIASES:
        return lower
    return lower.removesuffix("s") if len(lower) > 2 else lower


def _short(words: list[str]) -> tuple[str, ...]:
    short: list[str] = []
    power, is_divisor = "", False
    for word in words:
        lower = word.lower()
        if _ENDING.fullmatch(word):
            break
        if lower == "per":
            is_divisor = True
        elif lower in _POWERS:
            power = _POWERS[lower]
        else:
            name = "/".join(_short_part(part) for part in word.split("/")) + power
            if is_divisor and short:
                short[-1] += f"/{name}"
            else:
                short.append(name)
            power, is_divisor = "", False
    return tuple(short)


def _short_part(part: str) -> str:
    match = _WORD.fullmatch(part)
    if match is None:
        return part.lower()
    name = _singular(match[1])
    return _ALIASES.get(name, name) + (f"^{match[2]}" if match[2] else "")
