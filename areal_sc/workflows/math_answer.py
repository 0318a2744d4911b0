"""Finding the final answer of a text, and reading it as quantities, lists and tuples. No sympy.

    text ── final_answer ──► "3 cm and 5 cm" ── read_answer ──► a list of 3 cm and 5 cm

Reading is strict: either all of an answer is understood, or it is no mathematics. A number is never
picked out of something that was not understood.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from areal_sc.workflows.math_notation import MATH_CHARACTERS, plain_latex
from areal_sc.workflows.math_units import MULTIPLIERS, split_unit

MAX_ANSWER_CHARS = 1000

_NESTED = r"(?:\\.|[^{}\\])*+"
for _ in range(6):  # braces within braces
    _NESTED = rf"(?:\\.|[^{{}}\\]|\{{{_NESTED}\}})*+"
_BOX_COMMAND = r"\\(?:boxed|fbox)\b\s*"
_BOX = rf"{_BOX_COMMAND}(?:\{{{_NESTED}\}}|(?<=\s)[^\s{{])"
_MARKER = re.compile(
    rf"(?P<boxes>{_BOX}(?:[\s$,.;]*(?:(?:and|or)[\s$]*)?{_BOX})*)|(?P<broken>{_BOX_COMMAND})"
    r"|####|<answer>|\banswer\b[^\n.:=]{0,40}?(?:\bis\b|\bare\b|[:=])(?:\*\*|[\s:])*"
    r"|\bfinal answer\b\**:?\**\s*\n",
    re.IGNORECASE | re.DOTALL,
)
_SENTENCE_END = re.compile(r"\.(?=\s+[A-Z])|(?:(?<![\d)}!])!|\?)(?=\s|$)|\.\s*$")
_REFUSED_BEHIND = re.compile(
    r"(?:\b(?:not|than|least|most|between|from|no|never|except|times|plus|minus|by|over|nor|below"
    r"|above|under|before|after|within|without|almost|nearly|twice|double|mod|step|question"
    r"|equation|exceeds|up to|instead of)"
    r"|(?:\bnot|\bcannot|\bnever)(?:\s+[a-z]+){1,2}|n't(?:\s+[a-z]+){0,2}"
    r"|\b(?:all|any\w*|every\w*|nothing)(?:\s+[a-z]+)?\s+but"
    r"|(?:%|\d|\b(?:percent|out|half|thirds?|quarters?|multiples?|power|roots?|square|cube"
    r"|factors?|divisors?|minimum|maximum))\s+of),?$",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"[^,;:]*?\s(?:cannot|[a-z]+n't|(?:is|was|does|did|can)\s+not"
    r"|(?:is|was|seems|looks)\s+(?:[a-z]+\s+)?(?:wrong|incorrect|impossible|invalid|false))\b",
    re.IGNORECASE,
)
_MATH_WORD = re.compile(r".*(?:\\[A-Za-z]|[=+^]).*|[-*/<>|&]|[xyznk]|pi|sqrt.*")
_CONNECTORS = {"and", "or", "and,", "or,", ",", "to", "not", "between"}
_NOT_EMPTY = re.compile(r"[^\s*`$\\\[\]()]|\\[^\[\]()]")
_CLAUSE_END = re.compile(
    r"(?:[,;]\s*|\s+)\(?(?:because|since|as|so|which|when|where|that|if|after|but|not|for|at"
    r"|on|is|are|was|were|has|have|every|each|altogether|total|left|i\.e\.|hence|thus|then|and so"
    r"|instead|rather|remaining|more than|he|she|they|we|it)\b.*|;.*|\s*(?:=>|\\implies).*",
    re.IGNORECASE | re.DOTALL,
)
_LIST_SEPARATOR = re.compile(r"\s*,\s*(?:and|or)\b|[,;]|\b(?:and|or)\b")
_ITEM_SEPARATOR = re.compile(r"[,;]")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_EQUALS = re.compile(r"(?<![<>!=\\])=(?!=)|\\approx(?![A-Za-z])")
_NAME = re.compile(
    r"\\?[A-Za-z]\w*'?(?:_\{?\w+\}?)?(?:\([A-Za-z\d,]+\))?|\([A-Za-z](?:,[A-Za-z])+\)"
)
_MIXED = re.compile(r"(?<![\d.^{_])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[a-z]+\}|\\[A-Za-z]+")
_UNREADABLE = re.compile(
    r"[A-Za-z]{4}|\d\s+\d|\d\.\d*\.|[$%°#@\"?…]|[A-Za-z]{2,}\s|\s[A-Za-z]{2,}|[-+*/^=<>]\s*$|\d_"
)


@dataclass(frozen=True)
class Answer:
    """One value, or a group of them.

    Attributes:
        latex: all of it, in LaTeX that the parser takes.
        name: what it is the value of, as `x` in `x = 5`; empty if that is not said.
        equation: the whole of it in LaTeX, where it is an equation.
        unit: the words behind a value, shortened: ("km/h",); without them any unit is meant.
        is_percent: a percent sign followed the value.
        kind: of a group: `list` (no brackets: 3, 4 or 5), `{}`, or the brackets: `()`, `[)`, ...;
            empty of one value.
        items: of a group, in the order of the text.
    """

    latex: str
    name: str = ""
    equation: str = ""
    unit: tuple[str, ...] = ()
    is_percent: bool = False
    kind: str = ""
    items: tuple[Answer, ...] = ()


def final_answer(text: str) -> str | None:
    """What stands behind the last of `\\boxed{}`, `####` and "answer is"; None: there is none.

    Boxes with nothing but "and", "or" and commas between them are one list.
    """
    markers = list(_MARKER.finditer(text))
    if not markers:
        return None
    last = markers[-1]
    if last["boxes"]:
        boxes = re.findall(_BOX, last["boxes"], re.DOTALL)
        contents = (re.sub(_BOX_COMMAND, "", box, count=1) for box in boxes)
        return ", ".join(box[1:-1] if box.startswith("{") else box for box in contents)
    if last["broken"]:
        return ""
    # the rest of the line, or the next line that is not empty; its first sentence
    lines = [line for line in text[last.end() :].splitlines() if _NOT_EMPTY.search(line)]
    return _SENTENCE_END.split(lines[0].strip().partition("</")[0])[0] if lines else ""


def last_sentence(text: str) -> str:
    """Of the last line that is not empty."""
    lines = [line for line in text.splitlines() if _NOT_EMPTY.search(line)]
    if not lines:
        return ""
    sentences = [part.strip() for part in _SENTENCE_END.split(lines[-1]) if part.strip()]
    return sentences[-1] if sentences else ""


def last_expression(sentence: str, *, is_only: bool = False) -> str:
    """The last run of words that look like mathematics, with what follows it.

    Empty where there is none, where words around it change its meaning (less than 5, 5 is wrong),
    and, with `is_only`, where there is another one.
    """
    words = sentence.split()
    is_math = [_looks_like_math(word) for word in words]
    if True not in is_math:
        return ""
    end = len(words) - is_math[::-1].index(True)
    start = end - 1
    while start > 0 and (is_math[start - 1] or words[start - 1].lower() in _CONNECTORS):
        start -= 1
    while not is_math[start]:
        start += 1
    expression = " ".join(words[start:])
    if _REFUSED_BEHIND.search(" ".join(words[:start])) or _DENIED.match(expression):
        return ""
    return "" if is_only and any(is_math[:start]) else expression


def read_answer(text: str) -> Answer | None:
    """The whole text as mathematics; None if any part of it is something else."""
    if len(text) > MAX_ANSWER_CHARS:
        return None
    return _read(_without_thousands(plain_latex(text)))


def read_first_clause(text: str) -> Answer | None:
    """As `read_answer`, without an explanation that follows: `5, because 2 + 3 = 5`."""
    return read_answer(_CLAUSE_END.sub("", text, count=1)) if len(text) <= 4000 else None


def _looks_like_math(word: str) -> bool:
    bare = word.strip("*_`$.,;:!?()[]{}")
    if any(character in MATH_CHARACTERS or character.isnumeric() for character in bare):
        return True
    return bool(_MATH_WORD.fullmatch(bare or word))


def _read(text: str) -> Answer | None:
    if "\\pm" in text:
        text = f"{text.replace(chr(92) + 'pm', '+')}, {text.replace(chr(92) + 'pm', '-')}"
    parts = _split(text, _LIST_SEPARATOR)
    if len(parts) > 1:
        return _read_group("list", parts, text)
    parts = _split(text, _EQUALS)
    if len(parts) > 1:
        return _read_equation(text, parts)
    return _read_brackets(text) or _read_quantity(text)


def _read_equation(text: str, parts: list[str]) -> Answer | None:
    """`x = 5` is 5 with the name x; `3 + 4 = 7` is 7; anything else is an expression itself."""
    if not all(parts):
        return None
    value = _read(parts[-1])
    first = re.sub(r"\s", "", parts[0])
    if value is not None and _NAME.fullmatch(first):
        return replace(value, name=first, equation=text)
    if value is not None and not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", first)):
        return value
    quantity = _read_quantity(text)
    return quantity and replace(quantity, equation=text)


def _read_brackets(text: str) -> Answer | None:
    for opening, closing in (("\\{", "\\}"), ("(", ")"), ("[", "]"), ("(", "]"), ("[", ")")):
        if not (text.startswith(opening) and text.endswith(closing)):
            continue
        inner = text[len(opening) : -len(closing)]
        if not _is_balanced(inner):
            continue
        parts = _split(inner, _ITEM_SEPARATOR)
        kind = f"{opening}{closing}".replace("\\", "")
        if len(parts) == 1 and kind == "()":
            return _read(inner)
        return _read_group(kind, parts, text)
    return None


def _read_group(kind: str, parts: list[str], text: str) -> Answer | None:
    items = tuple(item for part in parts if (item := _read(part)) is not None)
    return Answer(text, kind=kind, items=items) if len(items) == len(parts) else None


def _read_quantity(text: str) -> Answer | None:
    text, unit = split_unit(text)
    if unit and unit[0] in MULTIPLIERS:
        text, unit = f"({text})\\cdot{MULTIPLIERS[unit[0]]}", unit[1:]
    is_percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    text = _MIXED.sub(r"(\1+\\frac{\2}{\3})", text)
    text = text.replace("°", "\\cdot\\frac{\\pi}{180}")
    if not text or re.fullmatch(r"[A-Za-z ]{2,}", text) or not _is_balanced(text):
        return None
    if _UNREADABLE.search(_COMMAND.sub(" \\\\ ", text)):
        return None
    return Answer(text, unit=unit, is_percent=is_percent)


def _split(text: str, separator: re.Pattern[str]) -> list[str]:
    """At separators outside of all brackets."""
    parts, start = [], 0
    for match in separator.finditer(text):
        if _is_balanced(text[start : match.start()]) and match.start() >= start:
            parts.append(text[start : match.start()])
            start = match.end()
    return [part.strip() for part in (*parts, text[start:])]


def _is_balanced(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0


def _without_thousands(text: str) -> str:
    """1,234 is a number; within brackets, as in (1,234), the comma separates."""
    return _THOUSANDS.sub(
        lambda match: (
            match.group().replace(",", "")
            if _is_balanced(text[: match.start()].replace("{", "").replace("}", ""))
            else match.group()
        ),
        text,
    )
