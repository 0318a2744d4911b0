"""Reading an answer as a tree of values, lists, brackets and equations. No sympy.

    "3 cm and 5 cm" ── read_answer ──► a list of 3 cm and 5 cm

Reading is strict: either all of an answer is understood, or it is no mathematics. A number is never
picked out of something that was not understood.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from areal_sc.rewards.math.place import CHANGING

_MAX_CHARS = 1000
_MAX_DEPTH = 12
"""The library's parser takes seconds for brackets much deeper than this."""

_UNITS = """
    m meter metre, cm centimeter centimetre, mm millimeter millimetre, km kilometer kilometre,
    inch inche in, ft foot feet, yd yard, mi mile, g gram gm, kg kilogram kilo, mg milligram,
    lb pound, oz ounce, l liter litre, ml milliliter millilitre, s second sec, min minute,
    h hour hr, day, wk week, yr year, mi/h mph, km/h kmh kph, $ dollar usd, € euro, £ gbp,
    ¢ cent, ° degree deg, °c celsius, °f fahrenheit, rad radian, am, pm
"""
_SHORT = {
    form: row.split()[0]
    for row in _UNITS.split(",")
    for name in row.split()
    for form in ((name, f"{name}s") if len(name) > 2 else (name,))
}
"""Every way to write a unit -> the short one."""

_NAMES = "|".join(map(re.escape, sorted(_SHORT, key=len, reverse=True)))
_UNIT = rf"(?:{_NAMES})(?:\^\{{?-?\d\}}?)?"
_NO_UNIT = re.compile(r"of|an?|to|at|on|for|per|the|each|every|more|less|total|altogether|left")
"""Words behind a number that say nothing of it: `5 in total`."""

_TEXT = re.compile(r"\\(?:text\w*|math(?:rm|bf|it|sf)|[mh]box|operatorname|rm|bf)\s*\{([^{}]*)\}")
_POWERS = {"thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_Rules = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
_RULES: _Rules = (
    # layout
    (r"\\(?:left|right|displaystyle|limits|boxed|fbox|[bB]igg?[lr]?)(?![A-Za-z])\.?", ""),
    (r"\\(?:bf|rm)(?![A-Za-z]|\s*\{)", ""),
    (r"(?s)[(\[]\s*(\\begin\{(p?matrix|array)\}.*?\\end\{\2\})\s*[)\]]", r"\1"),
    (r"\\([lr])angle(?![A-Za-z])", lambda m: "(" if m[1] == "l" else ")"),
    (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
    (r"\\([lr])brace(?![A-Za-z])", lambda m: r"\{" if m[1] == "l" else r"\}"),
    (r"\.\.\.|\\[lc]?dots(?![A-Za-z])", "\u2026"),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
    (r"\\varnothing(?![A-Za-z])", r"\\emptyset "),
    (r"(?<=\d)(?:,\s*\\!|\s*\{\\?,\s*\}|\\[,;: ])\s*(?=\d{3}(?!\d))", ""),
    (r"(?<!\\)\\[,;: ]|\\q?quad(?![A-Za-z])|~", " "),
    (r"\\?%|\b(?:per\s?cent(?:age)?|pct)\b", "%"),
    (r"\s*\^\s*\{?\s*\\(?:circ|degree)(?![A-Za-z])\s*\}?|\\degree(?![A-Za-z])", "\u00b0"),
    (r"\\[()\[\]]|\$\$", " "),
    (r"(?<!\\)\$((?:\\.|[^$\\])*)\$", r" \1 "),
    (r"\\\$", "$"),
    (r"(?<![\w)}\]])\*\*|\*\*(?![\w({\\])|`", ""),
    (_TEXT.pattern, r" \1 "),
    (r"(?<=[(\[{])\s+|\s+(?=[)\]}])|[\s.,;:*]+$", ""),
    # words that say nothing
    (r"^(?:(?i:the|is|are|equals|about|approximately|roughly)\b|[:=,~*\s]|\\approx\b)+", ""),
    (r"^an?\s+(?=\d)", ""),
    (r",\s*[A-Za-z]\s*\\in\s*\\mathbb\s*\{?[A-Z]\}?$", ""),
    (r"^\\?\{\s*[a-z]\s*(?:\||:|\\mid(?![a-z]))(.*?)\\?\}$", r"\1"),
    (r"\b(?:minus|negative)\s+(?=\d)", "-"),
    # one way to write a formula
    (r"\s+\^|\*\*", "^"),
    (r"(?<=\d) x (?=\$?\d)", r"\\times "),
    (r"(?<![A-Za-z\\])inf(?:inity)?(?![A-Za-z])", r"\\infty "),
    (r"(?<![A-Za-z\\])sqrt\s*(?:[({]([^(){}]*)[)}]|(\d+|[a-z](?![a-z])))", r"\\sqrt{\1\2}"),
    (r"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp)(?![A-Za-z])", r"\\\1 "),
    (r"\^\s*(-\d+)", r"^{\1}"),
    (r"\\(sin|cos|tan|cot|sec|csc)\s*(\d+\u00b0)", r"\\\1(\2)"),
    (
        r"(\d*\.(\d*))\\(?:overline|bar)\s*\{(\d+)\}",
        lambda m: rf"({m[1]}0+\frac{{{m[3]}}}{{{'9' * len(m[3])}{'0' * len(m[2])}}})",
    ),
    (r"(?<![\d.^{_/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
    (r"(?<![\d.A-Za-z])(\d*\.?\d+)[eE]([-+]?)\+?(\d+)(?![\w.])", r"\1\\cdot10^{\2\3}"),
    (rf"(?<=\d)\s*({'|'.join(_POWERS)})\b", lambda m: rf"\cdot10^{{{_POWERS[m[1]]}}}"),
    (r"(?<![\d.,(\[{])\d{1,3}(?:,\d{3})+(?![\d,)\]}])", lambda m: m[0].replace(",", "")),
    (r"^\d{1,3}(?: \d{3})+(?=\.\d|$)", lambda m: m[0].replace(" ", "")),
)
_UNIT_RULES: _Rules = (
    (r"(?i)^([-+]?)\s*([$€£¥¢])\s*(\S+)", r"\1\3 \2"),
    (rf"^([-+]?\d[\d.]*)(?=m(?:\^\{{?[23]\}}?|(?=/))(?:/{_UNIT})*$)", r"\1 "),  # 5m: a variable
    (rf"(?i)(?<=[\d)}}])((?![A-Za-z]\b|[A-Za-z]\^){_UNIT}(?:/{_UNIT})*)$", r" \1"),
    (rf"(?i)(?<=\s|/)({_NAMES})(?![A-Za-z])", lambda match: _SHORT[match[1].lower()]),
    (r"(?i)\s*/\s*(?=[A-Za-z])|(?<=[A-Za-z])\s+per\s+", "/"),
    (r"(?i)\b(?:sq|(cu))(?:uare|bic)?\s+([A-Za-z]+)", lambda m: f"{m[2]}^{3 if m[1] else 2}"),
)
_QUANTITY = re.compile(
    rf"(.*?\S)((?:\s+(?:(?!and\b)[A-Za-z][A-Za-z'/-]{{2,}}(?:\^\d)?|{_NO_UNIT.pattern}"
    rf"|{_UNIT}(?:/{_UNIT})*))*)",
    re.IGNORECASE | re.DOTALL,
)
_VARIABLES = re.compile(r"(?<![A-Za-z\\])[A-Za-z]|(?<=.)[+-]")
_CHOICE = re.compile(r"(?s)\(?([A-Z])[).]\s+(?!(?:and|or|is|not)\b|.*\b[A-Z]\))([\w\\$-].*)")
_BASE = re.compile(r"(?<=\d)\s*_\s*\{?(\d+)\}?$")
_SEPARATOR = re.compile(r"\s*,\s*(?:and|or)\b|[,;]|\b(?:and|or)\b")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\(?:approx|in)(?![A-Za-z])")
_BRACKETS = re.compile(r"(\\?[({\[])(.*?)(\\?[)}\]])", re.DOTALL)
_NAME = re.compile(
    r"\\?[A-Za-z]\w*'?(?:_\{?\w+\}?)?(?:\([A-Za-z\d, ]+\))?|\([A-Za-z](?:,\s*[A-Za-z])+\)"
)
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\[A-Za-z]+")
_UNREADABLE = re.compile(
    r"[A-Za-z]{4}|(?<![\d._])[\d.]+\s+\d|\d\.\d*\.|[$%@#\"?\u2026]|\d_|[-+*/^=<>]\s*$"
    r"|[\w)}\]]\s+[A-Za-z]{2,}|[A-Za-z]{2,}\s+[\w({]|^\s*[A-Za-z]{2,}\s*$|[A-Za-z]:\s+\d"
)
"""Prose (a word stands beside something without an operator), or what is not complete."""


@dataclass(frozen=True)
class Answer:
    """What was read.

    Attributes:
        latex: the text, in LaTeX that the parser takes; of words: as `plain_words` writes it.
        kind: `value`, `=` (an equation), `words`, `list` and `or` (no brackets: 3, 4 or 5), the
            brackets (`{}`, `()`, `[)`, ...), or what counts by each of its two items: `any`, a
            choice's letter and its text; `rounded`, a value and a decimal near it.
        items: the parts of a list or of brackets, in the order of the text.
        unit: what stands behind a value, shortened: `km/h`, `%`, `_8` (a base); without it any
            unit is meant.
        name: `x` of `x = 5`.
    """

    latex: str
    kind: str = "value"
    items: tuple[Answer, ...] = ()
    unit: str = ""
    name: str = ""


def plain_words(text: str) -> str:
    """Letters and digits alone, in lower case and without an article: to compare words by."""
    text = _TEXT.sub(r" \1 ", text).replace("**", " ").casefold()
    words = re.sub(r"[^\w+\-*/=<>]+", " ", text).strip(" _")
    return re.sub(r"^(?:the|an?) (?=\w\w)", "", words)


def read_answer(text: str) -> Answer | None:
    """The whole text as mathematics; None if any part of it is something else."""
    if len(text) > _MAX_CHARS:
        return None
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text)
    text = text.strip()
    if choice := _CHOICE.fullmatch(text):
        return _read_group("any", [*choice.groups()], text) or Answer(choice[1])
    return _read(text)


def _read(text: str) -> Answer | None:
    if r"\pm" in text:
        plus, minus = (re.sub(r"\\pm\s*", sign, text) for sign in "+-")
        text = f"{plus.removeprefix('+')}, {minus}"
    parts = _split(text)
    if len(parts) > 1:
        return _read_group("or" if re.search(r"\bor\b", text) else "list", parts, text)
    exact, _, rounded = text.partition(r"\approx")
    if rounded and not _NAME.fullmatch(exact.strip()):
        return _read_group("rounded", [exact, rounded], text)
    parts = _split(text, _EQUALS)
    if len(parts) > 1:
        return _read_equation(text, parts)
    brackets = _BRACKETS.fullmatch(text)
    if brackets is None or not _is_balanced(brackets[2]):
        return _read_value(text)
    kind = f"{brackets[1]}{brackets[3]}"
    parts = _split(brackets[2])
    if kind == "{}" or (kind in ("()", r"\{\}") and len(parts) == 1):
        return _read(brackets[2])
    return _read_group(kind.replace("\\", ""), parts, text)


def _read_equation(text: str, parts: list[str]) -> Answer | None:
    """`x = 5` is 5 with the name x; `3 + 4 = 7` is 7, `6 = 7` is not."""
    values = [_read(part) for part in parts[1:]]
    value = values[-1]
    if value and all(values) and not any(map(_NAME.fullmatch, parts[1:-1])):
        if _NAME.fullmatch(parts[0]):
            return replace(value, name=parts[0].replace(" ", ""))
        constants = _COMMAND.sub("", "".join([*parts[:-1], value.latex]))
        if not re.search(r"[A-Za-z]", constants) and not re.fullmatch(r"-?[\d.]+", parts[0]):
            return value
    return Answer(text, "=") if _read_value(text) else None


def _read_group(kind: str, parts: list[str], text: str) -> Answer | None:
    items = tuple(item for part in parts if (item := _read(part)) is not None)
    return Answer(text, kind, items) if len(items) == len(parts) else None


def _read_value(text: str) -> Answer | None:
    text, unit = _split_unit(text)
    if base := _BASE.search(text):
        text, unit = text[: base.start()], f"_{base[1]}"
    if text.endswith("%"):
        text, unit = text[:-1].strip(), "%"
    text = text.replace("\u00b0", r"\cdot\frac{\pi}{180}")
    if not text or not _is_balanced(text) or _UNREADABLE.search(_COMMAND.sub(" \\\\ ", text)):
        return None
    return Answer(text, unit=unit)


def _split_unit(text: str) -> tuple[str, str]:
    """(`5`, `m/s`) of `5 meters per second`; the first part is empty where words change it.

    A word is a unit that is known, or one of three letters or more that stands apart. Other
    letters stay: they are variables.
    """
    named = text
    for pattern, replacement in _UNIT_RULES:
        named = re.sub(pattern, replacement, named)
    match = _QUANTITY.fullmatch(named)
    core, words = (match[1], match[2].split()) if match else (text, [])
    if CHANGING.search(" ".join(words)):
        return "", ""
    has_letter = any(len(word) == 1 and word.isalpha() for word in words)
    is_article = words[-1:] == ["a"] or re.fullmatch("[A-Z]", core)
    if is_article or (has_letter and _VARIABLES.search(core)):
        return text, ""  # 2 a, A number, 2 + r, 2 r h
    unit = re.sub(r"[{}]", "", words[0].lower()) if words else ""
    return core, "" if _NO_UNIT.fullmatch(unit) else unit


def _is_balanced(text: str) -> bool:
    depths = [0, *accumulate("([{".count(it) - ")]}".count(it) for it in text)]
    return depths[-1] == min(depths) == 0 and max(depths) <= _MAX_DEPTH


def _split(text: str, separator: re.Pattern[str] = _SEPARATOR) -> list[str]:
    """At separators outside of all brackets."""
    parts, start = [], 0
    for match in separator.finditer(text):
        if match.start() >= start and _is_balanced(text[start : match.start()]):
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:])]
