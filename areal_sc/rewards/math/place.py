"""Where the answer stands in a text. Regular expressions and one scan; time is linear.

    text ── final_answer ──► the last mark's content, and the prose behind it that answers, too
         ── stated ────────► the expression that a place states, and others that must agree with it

Reasoning (`<think>...</think>`) gives no answer. A mark (a box, `####`, `<answer>`) is stronger
than prose ("the answer is"), and that is stronger than the last sentence. Prose is kept with its
formulas as single characters, so no rule for prose sees a formula.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

_MAX_CHARS: Final = 4000
"""A text is read from so many characters before its end."""

_FORMULAS: Final = "\ue000-\uf8ff"
"""Characters that stand for a formula in prose; they have no other meaning in Unicode."""

_CHARACTERS = str.maketrans(
    {
        **dict.fromkeys("\u2212\u2013", "-"),
        **{"\u2044": "/", "\u221a": "sqrt ", "\u00b7": r"\cdot ", "\u221e": r"\infty "},
        **{"\u00b1": r"\pm ", "\u2208": r"\in ", "\u2248": r"\approx "},
    }
)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_FRACTIONS = re.compile("(?=[\u00bc-\u00be\u2150-\u215e])")

_TURN_END = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id)\|>.*", re.DOTALL)
_POLITE = re.compile(r"\b(?:I hope|(?:Please )?[Ll]et me know)\b[^.!?\n]{0,80}[.!?]?\s*$")
_REASONING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|(?=<answer>)|\Z)", re.IGNORECASE | re.DOTALL)
_HASHES = re.compile(r"####(?!#)\s*([^\n]*)")
_WORD_FIRST = re.compile(r"\**[A-Za-z]{2}")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(?:(?<=\s)([^\s{}$;]+))?")
_JOINED_BEFORE = re.compile(
    r"(?:[-+/^]|\\(?:cdot|times|div|pm|sqrt|frac(?:\s*\{[^{}]*\})?)\s*)\{?$"
    r"|(?:\b(?:not|minus|negative)|n't)[\s$]*$"
)
_JOINED_BEHIND = re.compile(r" *(?:[+/^]|\\(?:cdot|times|div|pm)(?![A-Za-z]))|\d|[a-z]\b")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:\W|\\\w+|</?answer>)*|(?=.*\b(?:and|or)\b)(?:[^.\n]|\.(?=\d)){0,60}", re.DOTALL
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\\begin\{(\w+\*?)\}.+?\\end\{\1\}"
    r"|(?<!\\)\$(?:(?=\S)(?:\\.|[^$\\\n])*(?<=\S)\$(?!\d)| (?:\\.|[^$\\\n])* \$)"
    r"|(?<!\w)\(A\)|\bA(?=\W*$)",
    re.DOTALL | re.MULTILINE,
)
"""What is no prose whatever it says; an A at the end is no article."""

_SENTENCE_END = re.compile(
    rf"\.(?=\s+[A-Z{_FORMULAS}])|(?:(?<![\d)}}!\\])!|(?<=\?))(?=\s|$)|\.\**\s*$", re.MULTILINE
)
_CONTENT = re.compile(rf"[\w{_FORMULAS}]")
_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=\d)")

_SAID = re.compile(
    r"(?<!this )(?<!wrong )(?<!incorrect )\banswer\b(?:(?!not\b|n't)[^\n.:=]){0,40}?"
    r"(?:\bis\b|\bare\b|[:=])(?:\*\*|[\s:])*",
    re.IGNORECASE,
)
_STATES = re.compile(
    r"(?:^|:|\b(?:so|thus|hence|therefore|then|that|point|answer|not\s+\S+\s+but))[,\s*]*$"
    r"|\b(?:(?:turns? out to|must|will|would) be|comes? to|is|are|was|equals?|has|have|had|left"
    r"|gets?|got|gives?|yields?|makes?|made|takes?|took|needs?|pays?|paid|costs?|earn(?:s|ed)"
    r"|sold|sells?|runs?|ran|reads?|spends?|spent|saves?|saved|buys?|bought)\b[:,\s*]*"
    r"(?:(?:an?(?:\s+grand)?\s+(?:total|profit|probability|sum|value)\s+of|the|an?|now|only|also"
    r"|exactly|about|approximately|roughly|therefore|thus|then|hence)\b[,\s*]*)*$",
    re.IGNORECASE,
)
"""What says that the expression directly behind it is the answer. `We tried 34` is no answer."""

_MAX_LEAD: Final = 60
"""Characters before an expression that are looked at for what states it."""

_FILLING = re.compile(
    r"(?:(?:therefore|thus|hence|so|simply|just|exactly|equals|equal to|is|are|the|an?|number|value"
    r"|answer|result|option|choice|approximately|about|roughly|it|be|then|total of)\b"
    r"|[:=,~*\s]|\\approx\b)+",
    re.IGNORECASE,
)
"""Words before a marked answer that say nothing of it."""

_HYPOTHESIS = re.compile(
    r"\b(?:if|unless|suppose|assum\w+|let|unlikely|cannot|doubt\w*|claim\w*|guess\w*|false|wrong"
    r"|incorrect|(?:I|we)\s+\w+(?:\s+not\b|n't))",
    re.IGNORECASE,
)
_PREDICATE = re.compile(
    r"(?:is|are|was|were|has|have|divides?)\b(?!.*\b(?:answer|solution|result)\b)", re.IGNORECASE
)
"""Behind an expression: the sentence says something about it, and does not state it."""

_CLAUSE = re.compile(r"[,;:]\s")
CHANGING = re.compile(
    r"\b(?:or|not|no|never|cannot|but|than|least|most|except|maybe|perhaps|possibly|might|either"
    r"|otherwise|before|within|without|plus|minus|times|(?<!left )over|by|below|above|squared|cubed"
    r"|factorial|half|halves|pairs?|(?<!the )point|out(?! to)|mod|modulo|base|divided|wrong|too"
    r"|incorrect|impossible|invalid|false|extraneous|rejected|dozen|hundred"
    r"|(?:third|quarter|fourth|fifth|sixth|eighth|tenth|hundredth)s?)\b|n't",
    re.IGNORECASE,
)
"""Behind an expression one of these makes it another one, or denies it: `5 squared`."""

_ASIDE = re.compile(
    rf"\W*\b(?:because|since|which|where|not(?=\s+\W?[\d{_FORMULAS}]))\b(?!.*\b(?:wrong|incorrect"
    r"|impossible|invalid|false)\b).*|^\W*(?:but|after|by|from)\b",
    re.IGNORECASE | re.DOTALL,
)
"""What follows an answer and neither changes it nor has to agree with it."""

_MATH_WORD = re.compile(
    rf".*(?:\\[A-Za-z]|[=+^\d\u00b0\u00d7\u00f7\u03c0\u2200-\u22ff{_FORMULAS}]).*"
    r"|[-*/<>|&]|[b-zB-HJ-Z]|pi|sqrt.*"
)
_CONNECTORS = {"and", "or", "and,", "or,", ",", "to", "between"}


@dataclass(frozen=True)
class Prose:
    """A text that may hold the answer, in which each delimited formula is one character.

    Attributes:
        is_marked: the text is an answer, not a sentence that may state one.
    """

    text: str
    formulas: dict[int, str]
    is_marked: bool = False

    @classmethod
    def of(cls, text: str, *, is_marked: bool = False) -> Prose:
        formulas: dict[int, str] = {}

        def mask(match: re.Match[str]) -> str:
            character = 0xE000 + len(formulas)
            formulas[character] = f" {match.group()} "
            return chr(character)

        return cls(_FORMULA.sub(mask, text[-_MAX_CHARS:]), formulas, is_marked)

    def plain(self, part: str | None = None) -> str:
        """The text, or a part of it, with its formulas."""
        return (self.text if part is None else part).translate(self.formulas)

    def said(self) -> list[Prose]:
        """What the last "the answer is" gives, of those with mathematics behind them if any."""
        said = [_sentences(self.text[mark.end() :])[0] for mark in _SAID.finditer(self.text)]
        return [Prose(text, self.formulas, True) for text in sorted(said, key=_has_math)[-1:]]


def final_answer(text: str) -> list[Prose]:
    """The last mark's content, and what the prose behind it says; else the last sentence.

    Marks with only "and" or "or" between them are one list.
    """
    text = re.sub(f"[{_FORMULAS}]", "?", _without_reasoning(_TURN_END.sub("", text)))
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match.group()}}}", text)
    text = unicodedata.normalize("NFKC", _FRACTIONS.sub(" ", text)).translate(_CHARACTERS)
    text = _MINUS.sub("-", text)
    marks = _marks(text)
    prose = Prose.of(_POLITE.sub("", text[max((end for _, end, _ in marks), default=0) :]))
    if not marks:
        return prose.said() or [Prose(_sentences(prose.text)[-1], prose.formulas)]
    start, _, content = marks.pop()
    contents = [content.strip()]
    while marks and _BETWEEN.fullmatch(text[marks[-1][1] : start]):
        start, _, content = marks.pop()
        contents.insert(0, content.strip())
    marked = ", ".join(contents if len(set(contents)) > 1 else contents[:1])
    place = Prose.of(marked, is_marked=True)
    return [*(place.said() or [place]), *prose.said()]


def stated(place: Prose) -> list[str]:
    """The expression that a place states, with the words behind it; others that must agree with it.

    Empty where it states none, or says that it is not the answer.
    """
    words = place.text.split()
    if place.is_marked:
        filling = _FILLING.match(place.text)
        filled = place.text[filling.end() if filling else 0 :].split()
        if filled and _is_math(filled[0]):
            return [place.plain(part) for part in _with_rest(filled, 0)]
    for start, stop in reversed([*_runs(words)]):
        before, behind = " ".join(words[:start]), " ".join(words[stop:])
        if words[start] == "=" or _STATES.search(before[-_MAX_LEAD:]):
            if (
                _HYPOTHESIS.search(_CLAUSE.split(before.rstrip(" ,;:"))[-1])
                or _PREDICATE.match(behind)
                or place.text.endswith("?")
            ):
                return []
            return [place.plain(part) for part in _with_rest(words, start)]
    return []


def _with_rest(words: list[str], start: int) -> list[str]:
    """`5 apples` and `2 + 3 = 5` of `5 apples, so 2 + 3 = 5`, from the run of words at `start` on.

    Empty where words behind it make it another one.
    """
    words = words[start:]
    _, stop = next(_runs(words))
    behind = _ASIDE.sub("", " " + " ".join(words[stop:]))
    if CHANGING.search(behind):
        return []
    words[stop:] = behind.split()
    (_, end), *others = _runs(words)
    limit = others[0][0] if others else len(words)
    while end < limit and words[end - 1][-1] not in ",;:" and words[end][0].isalpha():
        end += 1
    return [" ".join(words[:end]).rstrip(",;:"), *(" ".join(words[a:b]) for a, b in others)]


def _runs(words: list[str]) -> Iterator[tuple[int, int]]:
    """Where runs of words that look like mathematics begin and end."""
    are_math = [_is_math(word) for word in words]
    stop = 0
    while True in are_math[stop:]:
        start = are_math.index(True, stop)
        at = stop = start + 1
        while at < len(words) and (are_math[at] or words[at].lower() in _CONNECTORS):
            at += 1
            stop = at if are_math[at - 1] else stop
        yield start, stop


def _has_math(text: str) -> bool:
    return any(map(_is_math, text.split()))


def _is_math(word: str) -> bool:
    return bool(_MATH_WORD.fullmatch(word.strip("*_`$.,;:!?()[]{}") or word))


def _without_reasoning(text: str) -> str:
    """The text behind the last `</think>` and before a `<think>` that is not closed."""
    start = max((tag.end() for tag in _REASONING.finditer(text) if tag[1]), default=0)
    opened = _REASONING.search(text, start)
    return text[start : opened.start() if opened else len(text)]


def _marks(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each mark; a mark around others only says where they stand."""
    marks = _boxes(text) + [(tag.start(), tag.end(), tag[1]) for tag in _ANSWER.finditer(text)]
    last_line = text.rstrip().rfind("\n")
    for match in _HASHES.finditer(text):
        is_heading = _WORD_FIRST.match(match[1]) and match.start() < last_line
        if not is_heading:
            marks.append((match.start(), match.end(), _sentences(match[1])[0]))
    marks.sort()
    starts = [*(start for start, _, _ in marks[1:]), len(text)]
    return [mark for mark, start in zip(marks, starts, strict=False) if mark[1] <= start]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost boxes; one that is not closed, or is a part of a formula, is empty."""
    closing, opened = {}, []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    boxes: list[tuple[int, int, str]] = []
    for match in _BOX.finditer(text):
        end, content = match.end(), match[1] or ""
        if not content and text[end : end + 1] == "{":
            end = closing.get(match.end(), end) + 1
            content = text[match.end() + 1 : end - 1]
        before = text[max(match.start() - 20, 0) : match.start()]
        if _JOINED_BEFORE.search(before) or _JOINED_BEHIND.match(text, end):
            content = ""
        if not boxes or match.start() >= boxes[-1][1]:
            boxes.append((match.start(), end, content))
    return boxes


def _sentences(text: str) -> list[str]:
    """All sentences, without a closing tag; one that is empty if there is none."""
    lines = (_SENTENCE_END.split(line.partition("</")[0]) for line in text.splitlines())
    return [part.strip() for line in lines for part in line if _CONTENT.search(part)] or [""]
