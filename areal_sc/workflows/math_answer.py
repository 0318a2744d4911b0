"""Reading an answer as quantities, groups, equations or words. No sympy.

    "3 cm and 5 cm" ── read_answer ──► a list of 3 cm and 5 cm

Reading is strict: either all of an answer is understood, or it is no mathematics. A number is never
picked out of something that was not understood. Formulas are read by rules for formulas alone;
`math_prose` knows what words around them mean.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

from areal_sc.workflows.math_place import MAX_ANSWER_CHARS
from areal_sc.workflows.math_prose import MULTIPLIERS, split_unit, without_lead

_UNICODE = (
    "\u2212\u2013\u00f7\u2044\u221a\u00b0\u00d7\u00b7\u22c5\u03c0"
    "\u221e\u2264\u2265\u2260\u00b1\u222a\u2229\u2208\u2205\u2248"
)
_LATEX = (
    r"- - / / sqrt ^\circ \times \cdot \cdot \pi "
    r"\infty \le \ge \ne \pm \cup \cap \in \emptyset \approx"
)
_CHARACTERS = str.maketrans(
    {
        character: f"{latex} " if latex.startswith("\\") else latex
        for character, latex in zip(_UNICODE, _LATEX.split(), strict=True)
    }
)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_FRACTIONS = re.compile("(?=[\u00bc-\u00be\u2150-\u215e])")
_GROUP = r"\{(?:[^{}]|\{[^{}]*\})*\}"
_END = r"(?![A-Za-z])"
_TEXT = re.compile(
    r"\\(?:text(?:normal|bf|it|rm|sf|tt)?|math(?:rm|bf|it|sf)|[mh]box|operatorname|rm|bf)"
    r"\s*\{([^{}]*)\}"
)

_LAYOUT = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\\(?:left|right|displaystyle|limits|[lL]arge|huge|small|[bB]igg?[lr]?){_END}\.?", ""),
        (r"\\(?:text)?color\s*\{[^{}]*\}", ""),
        (rf"\\[dtc]frac{_END}", r"\\frac"),
        (rf"\\(?:lbrace|\{{){_END}", r"\\{"),
        (rf"\\(?:rbrace|\}}){_END}", r"\\}"),
        (r"(?<=\d)(?:,\s*\\!\s*|\{\\?,\}|\\[,;: ])(?=\d{3}(?!\d))", ""),
        (r"\\!\s*", ""),
        (rf"(?<!\\)\\[,;: ]|\\q?quad{_END}|~", " "),
        (r"\\?%|\bper\s?cent(?:age)?\b|\bpct\b", "%"),
        (rf"\s*\^\s*\{{?\s*\\(?:circ|degree){_END}\s*\}}?|\\degree{_END}", "\u00b0"),
        (r"\\[()\[\]]|\$\$", " "),
        (r"(?<!\\)\$((?:\\.|[^$\\])*)\$", r" \1 "),
        (r"\\\$", "$"),
        (r"(?<![\w)}\]])(?:\*\*|__)|(?:\*\*|__)(?![\w({\\])|`", ""),
        (rf"\\([lg]e)q(?:slant)?{_END}", r"\\\1"),
        (r"\.\.\.|\\[lc]?dots", "\u2026"),
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (rf"\\varnothing{_END}", r"\\emptyset "),
        (
            r"\\begin\{cases\}(.*)\\end\{cases\}",
            lambda match: re.sub(r",?\s*\\\\", ", ", match[1]),
        ),
    )
]


def _without_repetition(decimal: re.Match[str]) -> str:
    """`0.1\\overline{6}` as a fraction."""
    whole, once, again = decimal.groups()
    value = Fraction(int(whole + once + again) - int(whole + once))
    value /= 10 ** len(once) * (10 ** len(again) - 1)
    return rf"\frac{{{value.numerator}}}{{{value.denominator}}}"


_NOTATION = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\s+\^", "^"),
        (r"(?<=\d)\s+[xX]\s+(?=\$?\d)", r"\\times "),
        (rf"^[A-Za-z]\s*\\in{_END}", ""),
        (rf"(?<![A-Za-z\\])(?:infinity|inf){_END}", r"\\infty "),
        (r"(?<![A-Za-z\\])(?:minus|negative)\s+(?=\d)", "-"),
        (r"(?<![A-Za-z\\])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![A-Za-z\\])sqrt\s*(?=\{)", r"\\sqrt"),
        (r"(?<![A-Za-z\\])sqrt\s*(\d+|[a-z](?![a-z]))", r"\\sqrt{\1}"),
        (rf"(?<![A-Za-z\\])(pi|sin|cos|tan|ln|log|exp){_END}", r"\\\1 "),
        (rf"\\(frac|binom)\s*(\d|[a-z])\s*(\d|[a-z]){_END}", r"\\\1{\2}{\3}"),
        (r"\\(frac|binom)\s*(\d|[a-z])\s*(?=\{)", r"\\\1{\2}"),
        (rf"(\\(?:frac|binom)\s*{_GROUP})\s*(\d|[a-z])", r"\1{\2}"),
        (rf"\\sqrt\s*(\d|[a-z]){_END}", r"\\sqrt{\1}"),
        (r"(?<![\d.^{_/])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.])", r"\1\\frac{\2}{\3}"),
        (r"\\log\s*_\s*(\w)", r"\\log_{\1}"),
        (r"\*\*", "^"),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*([-+]?\d+(?:\.\d+)?)", r"^{\1}"),
        (
            r"(?<![\d.A-Za-z])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?)\+?(\d+)(?![\w.])",
            r"\1\\cdot10^{\2\3}",
        ),
        (r"(?<![\d,.])(\d{1,3}(?: \d{3})+)(?=\.\d|$)", lambda m: m.group().replace(" ", "")),
        (r"(?<![.,\d])\.(?=\d)", "0."),
        (r"(\d+)\.(\d*)\\(?:overline|bar)\s*\{(\d+)\}", _without_repetition),
    )
]
_CHOICE = re.compile(
    r"^\(?([A-Z])[).]\s+(?!and\b|or\b|is\b|not\b)(?!.*\b[A-Z]\))[\w$].*$", re.DOTALL
)
_LIST_SEPARATOR = re.compile(r"\s*,\s*(?:and|or)\b|[,;]|\b(?:and|or)\b")
_ITEM_SEPARATOR = re.compile(r"[,;]")
_BRACKETS = re.compile(
    r"(\\\{)(.*)(\\\})|([(\[])(.*)([)\]])|(\{)(.*)(\})",
    re.DOTALL,
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_EQUALS = re.compile(rf"(?<![<>!=\\])=(?!=)|\\approx{_END}")
_NAME = re.compile(
    r"\\?[A-Za-z]\w*'?(?:_\{?\w+\}?)?(?:\([A-Za-z\d,]+\))?|\([A-Za-z](?:,[A-Za-z])+\)"
)
_MIXED = re.compile(r"(?<![\d.^{_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z*]+\}|\\[A-Za-z]+")
_UNREADABLE = re.compile(
    r"[A-Za-z]{4}|\d\s+\d|\d\.\d*\.|[$%@#\"?\u2026]|\d_|[-+*/^=<>]\s*$"
    r"|[\w)}\]]\s+[A-Za-z]{2,}|[A-Za-z]{2,}\s+[\w({]"
    r"|^\s*[A-Za-z]{2,}\s*$|[A-Za-z]:\s+\d"
)
"""Prose (a word stands beside something without an operator), or what is not complete."""


@dataclass(frozen=True)
class Quantity:
    """One value.

    Attributes:
        latex: the value, in LaTeX that the parser takes.
        unit: the words behind it, shortened: ("km/h",); without them any unit is meant.
        is_percent: a percent sign followed it.
    """

    latex: str
    unit: tuple[str, ...] = ()
    is_percent: bool = False


@dataclass(frozen=True)
class Group:
    """Several answers, in the order of the text.

    Attributes:
        kind: `list` (no brackets: 3, 4 or 5), `{}`, or the brackets: `()`, `[)`, ...
    """

    latex: str
    kind: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Equation:
    """`x = 5` has the name x and a value; of another equation both are empty."""

    latex: str
    name: str = ""
    value: Answer | None = None


@dataclass(frozen=True)
class Words:
    """An answer without mathematics, as `plain_words` writes it."""

    latex: str


Answer = Quantity | Group | Equation | Words


def plain_layout(text: str) -> str:
    """The same text without layout: one way to write each character and each space."""
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match.group()}}}", text.translate(_CHARACTERS))
    text = unicodedata.normalize("NFKC", _FRACTIONS.sub(" ", text)).translate(_CHARACTERS)
    for pattern, replacement in _LAYOUT:
        text = pattern.sub(replacement, text)
    return _TEXT.sub(r" \1 ", text).strip()


def plain_words(text: str) -> str:
    """Letters and digits alone, in lower case and without an article: to compare words by."""
    text = _TEXT.sub(r" \1 ", unicodedata.normalize("NFKC", text)).replace("**", " ").casefold()
    words = re.sub(r"[^\w+\-*/=<>]+", " ", text).strip(" _").split()
    has_article = len(words) > 1 and words[0] in ("the", "a", "an") and len(words[1]) > 1
    return " ".join(words[1:] if has_article else words)


def read_answer(text: str) -> Answer | None:
    """The whole text as mathematics; None if any part of it is something else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    text = without_lead(plain_layout(text)).rstrip(".,;:* \n")
    text = _CHOICE.sub(r"\1", text)
    for pattern, replacement in _NOTATION:
        text = pattern.sub(replacement, text)
    return _read(_without_thousands(text.strip()))


def is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def _read(text: str) -> Answer | None:
    if re.search(rf"\\pm{_END}", text):
        plus, minus = (re.sub(rf"\\pm{_END}\s*", sign, text) for sign in "+-")
        text = f"{plus.removeprefix('+')}, {minus}"
    parts = _split(text, _LIST_SEPARATOR)
    if len(parts) > 1:
        return _read_group("list", parts, text)
    parts = _split(text, _EQUALS)
    if len(parts) > 1:
        return _read_equation(text, parts)
    return _read_brackets(text) or _read_quantity(text)


def _read_equation(text: str, parts: list[str]) -> Answer | None:
    """`x = 5` is 5 with the name x; `3 + 4 = 7` and `Sum = 7` are 7, `6 = 7` is not."""
    if not all(parts):
        return None
    name, *others = (re.sub(r"\s*([^\w\s])\s*", r"\1", part) for part in parts)
    value = _read(parts[-1])
    if value is not None and not any(_NAME.fullmatch(other) for other in others[:-1]):
        if re.fullmatch(r"[A-Za-z]{3,}", name):
            return value
        if _NAME.fullmatch(name):
            return Equation(text, name, value)
        constants = _COMMAND.sub("", "".join([*parts[:-1], value.latex]))
        if not re.search(r"[A-Za-z]", constants) and not re.fullmatch(r"-?[\d.]+", name):
            return value
    return Equation(text) if _read_quantity(text) is not None else None


def _read_brackets(text: str) -> Answer | None:
    match = _BRACKETS.fullmatch(text)
    if match is None:
        return None
    opening, inner, closing = filter(lambda group: group is not None, match.groups())
    if not is_balanced(inner):
        return None
    parts = _split(inner, _ITEM_SEPARATOR)
    kind = f"{opening}{closing}".replace("\\", "")
    is_grouping = opening == "{" or (len(parts) == 1 and kind == "()")
    return _read(inner.strip()) if is_grouping else _read_group(kind, parts, text)


def _read_group(kind: str, parts: list[str], text: str) -> Answer | None:
    items = tuple(item for part in parts if (item := _read(part)) is not None)
    return Group(text, kind, items) if len(items) == len(parts) else None


def _read_quantity(text: str) -> Quantity | None:
    text, unit = split_unit(text)
    if unit and unit[0] in MULTIPLIERS:
        text, unit = f"({text})\\cdot{MULTIPLIERS[unit[0]]}", unit[1:]
    is_percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = text.replace("\u00b0", "\\cdot\\frac{\\pi}{180}")
    if not text or not is_balanced(text) or _UNREADABLE.search(_COMMAND.sub(" \\\\ ", text)):
        return None
    return Quantity(text, unit, is_percent)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """At separators outside of all brackets."""
    parts, start = [], 0
    for match in separator.finditer(text):
        if match.start() >= start and is_balanced(text[start : match.start()]):
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:])]


def _without_thousands(text: str) -> str:
    """1,234 is a number; within brackets, as in (1,234), the comma separates."""
    return _THOUSANDS.sub(
        lambda match: (
            match.group().replace(",", "")
            if is_balanced(re.sub(r"(?<!\\)[{}]", "", text[: match.start()]))
            else match.group()
        ),
        text,
    )
