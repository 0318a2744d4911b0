"""Where the answer stands in a text. Regular expressions and one scan; time is linear.

    text ── final_answer ──► the last mark's content, and the prose behind it that answers, too
         ── candidates ────► parts of it that may be the answer, with their formulas

Reasoning (`<think>...</think>`) gives no answer. A mark (a box, `####`, `<answer>`) is stronger
than prose ("the answer is"). In prose the characters of a formula are replaced by others that mean
nothing, so no rule for prose sees a formula; `shown` gives them back.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Final, NamedTuple

from areal_sc.rewards.answer_text import last_together, without_reasoning

_MAX_CHARS: Final = 4000
"""A text is read from so many characters before its end."""

_FORMULAS: Final = "\ue000-\uf8ff"
"""Characters that stand for those of a formula in prose; they have no meaning in Unicode."""

_HIDDEN = {code: 0xE000 + code for code in range(0x1900)}
_SHOWN = {hidden: code for code, hidden in _HIDDEN.items()}

_CHARACTERS = str.maketrans("\u2212\u2013\u2044", "--/") | str.maketrans(
    {"\u221a": "sqrt ", "\u00b7": r"\cdot ", "\u221e": r"\infty ", "\u00b1": r"\pm "}
    | {"\u2208": r"\in ", "\u2248": r"\approx "}
)
_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_FRACTIONS = re.compile("(?=[\u00bc-\u00be\u2150-\u215e])")

_TURN_END = re.compile(r"<\|(?:im_start|im_end|endoftext|eot_id)\|>.*", re.DOTALL)
_POLITE = re.compile(r"\b(?:I hope|(?:Please )?[Ll]et me know)\b[^.!?\n]{0,80}[.!?]?\s*$")
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|(?=<answer>)|\Z)", re.IGNORECASE | re.DOTALL)
_HASHES = re.compile(r"####(?!#)\s*(?!\**[A-Za-z]{2}.*\n\s*\S)([^\n]*)")
"""Words with other lines behind them are a heading."""

_BRACED = r"[^{}]*"
for _ in range(12):  # so deep may braces stand in a box
    _BRACED = rf"(?:[^{{}}\\]|\\.|\{{{_BRACED}\}})*+"
_BOX = re.compile(
    rf"\\(?:boxed|fbox)(?![A-Za-z])(?:(?:\s*\{{({_BRACED})\}}|\s+([^\s{{}}$;]++))"
    r"(?! *(?:[+/^]|\\(?:cdot|times|div|pm)(?![A-Za-z]))|\d|[a-z]\b)|)",
    re.DOTALL,
)
"""A box that is not closed, or goes on as a formula, is empty."""

_JOINED_BEFORE = re.compile(
    r"(?:[-+/^]|\\(?:cdot|times|div|pm|sqrt|frac(?:\s*\{[^{}]*\})?)\s*)\{?$"
    r"|(?:\b(?:not|minus|negative)|n't)[\s$]*$"
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\\begin\{(\w+\*?)\}.+?\\end\{\1\}"
    r"|(?<!\\)\$(?:(?=\S)(?:\\.|[^$\\\n])*(?<=\S)\$(?!\d)| (?:\\.|[^$\\\n])* \$)",
    re.DOTALL,
)
_SAID = re.compile(r"(?i)(?<!this )\banswer\b[^\n.:=]{0,40}?(?:\b(?:is|are)\b|[:=])[*\s:]*")
_SENTENCE_END = re.compile(
    rf"\.(?=\s+[A-Z{_FORMULAS}])|(?:(?<![\d)}}!\\])!|(?<=\?))(?=\s|$)|\.\**\s*$"
)
_CONTENT = re.compile(rf"[\w{_FORMULAS}]")
_MATH_WORD = re.compile(
    rf".*(?:\\[A-Za-z]|[=+^\d\u00b0\u00d7\u00f7\u03c0\u2200-\u22ff{_FORMULAS}]).*"
    r"|[-*/<>|&]|[b-zB-HJ-Z]|pi|sqrt.*"
)
_CONNECTORS = {"and", "or", "and,", "or,", ",", "to", "not", "between"}
_COPULA = re.compile(r"(?:\b(?:is|are|equals?|be|to)|[:=])\**$", re.IGNORECASE)
_CLAUSE = re.compile(r"[,;:]\s+(?=\S+\s+\S)")
CHANGING = re.compile(
    r"\b(?:not|no|nor|never|cannot|but|than|least|most|between|from|up to|except|maybe|perhaps"
    r"|possibly|might|either|otherwise|plus|minus|times|(?<!left )over|by|below|above|under|before"
    r"|after|within|without|almost|nearly|exceeds|twice|double|half|halves|pairs?|squared|cubed"
    r"|factorial|(?<!the )point|out(?! to)|mod|modulo|base|divided|step|question|problem|equation"
    r"|page|figure|wrong|incorrect|impossible|invalid|false|extraneous|rejected|too|dozen|hundred"
    r"|(?:third|quarter|fourth|fifth|sixth|eighth|tenth|hundredth)s?)\b|n't",
    re.IGNORECASE,
)
"""Beside one of these a number means something else: `less than 5`, `5 squared`."""

_REFUSED = re.compile(
    rf"(?:{CHANGING.pattern})$|\b(?:if|unless|suppose|assum\w+|let)\b"
    r"|\b(?:I|we)\s+\w+(?:\s+not\b|n't)"
    r"|(?:\b(?:not|no|never|cannot|might|unlikely|wrong|incorrect)|n't)"
    r"(?:\s+(?!(?:is|are|was|equals)\b)[\w']+){0,2},?$"
    rf"|[\d{_FORMULAS}]\S*\s+(?:.*\s)?(?:and|or|in|per),?$"
    r"|\b(?:(?<!\ba )(?<!\ban )\w+|half|third|quarter|multiple|factor|divisor|power|root|fraction"
    r"|percentage|square|cube|minimum|maximum)\s+of$|%\s+of$|^(?:of|in|for|with)$"
    r"|\b(?:the|first|last|next|other|these|those|all|both|another|each|every|its|their|our)$",
    re.IGNORECASE,
)
"""A clause that says of the expression behind it that it is not the answer, or not alone.

`the root of 5` is another number; `a total of 5` is 5. `the first 5` counts what is known already.
"""

_REASON = re.compile(r",?\s+\(?(?:because|since)\b.*", re.IGNORECASE | re.DOTALL)
_REST = re.compile(
    rf"(?:[,;]\s*|\s+)\(?(?:(as(?! well)|where|not(?=\s+\W?[\d{_FORMULAS}]))"
    r"|which|so|when|that|if|after|but|for|in|at|to|on|is|are|was|were|has|have|every|each"
    r"|altogether|total|left|hence|thus|then|instead|rather|remaining|he|she|they|we|it)\b"
    rf"|\s+\((?=[^\d{_FORMULAS}]*\)$)",
    re.IGNORECASE,
)
"""What follows an answer: a reason, something about it, or other words."""


class AnswerPlace(NamedTuple):
    """A text that holds the answer, its formulas hidden.

    Attributes:
        is_answer: the text is an answer and nothing else, not a sentence that ends with one.
    """

    text: str
    is_answer: bool


def final_answer(text: str) -> list[AnswerPlace]:
    """The last mark's content, and what the prose behind it says; else the last sentence.

    Marks with only "and" or "or" between them are one list.
    """
    text = plain_signs(without_reasoning(_TURN_END.sub("", text)))
    marks = _marks(text)
    prose = _hide(_POLITE.sub("", text[max((end for _, end, _ in marks), default=0) :]))
    if not marks:
        return _said(prose) or [AnswerPlace(_sentences(prose)[-1], is_answer=False)]
    marked = _hide(", ".join(last_together(text, marks)))
    return [*(_said(marked) or [AnswerPlace(marked, is_answer=True)]), *_said(prose)]


def shown(text: str) -> str:
    """The text with its formulas."""
    return text.translate(_SHOWN)


def _hide(text: str) -> str:
    return _FORMULA.sub(lambda it: f" {it.group()} ".translate(_HIDDEN), text[-_MAX_CHARS:])


def _said(prose: str) -> list[AnswerPlace]:
    """What the last "the answer is" gives, of those with mathematics behind them if any."""
    said = [_sentences(prose[mark.end() :])[0] for mark in _SAID.finditer(prose)]
    return [AnswerPlace(sentence, is_answer=True) for sentence in sorted(said, key=_has_math)[-1:]]


def plain_signs(text: str) -> str:
    """The text with the signs of Unicode as LaTeX writes them, and without the `_FORMULAS`."""
    text = re.sub(f"[{_FORMULAS}]", "?", text)
    text = _SUPERSCRIPTS.sub(lambda match: f"^{{{match.group()}}}", text)
    return unicodedata.normalize("NFKC", _FRACTIONS.sub(" ", text)).translate(_CHARACTERS)


def _marks(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each mark; a mark around others only says where they stand."""
    marks = _boxes(text) + [(tag.start(), tag.end(), tag[1]) for tag in _ANSWER.finditer(text)]
    marks += [(it.start(), it.end(), _sentences(it[1])[0]) for it in _HASHES.finditer(text)]
    marks.sort()
    starts = [*(start for start, _, _ in marks[1:]), len(text)]
    return [mark for mark, start in zip(marks, starts, strict=False) if mark[1] <= start]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost boxes; one that is a part of a formula is empty."""
    boxes = []
    for box in _BOX.finditer(text):
        is_part = _JOINED_BEFORE.search(text, max(box.start() - 20, 0), box.start())
        boxes.append((box.start(), box.end(), "" if is_part else box[1] or box[2] or ""))
    return boxes


def _sentences(text: str) -> list[str]:
    """All sentences, without a closing tag; one that is empty if there is none."""
    lines = (_SENTENCE_END.split(line.partition("</")[0]) for line in text.splitlines())
    return [part.strip() for line in lines for part in line if _CONTENT.search(part)] or [""]


def candidates(place: AnswerPlace) -> Iterator[str]:
    """Parts that may be the answer, the most likely one first.

    If the place is an answer itself, another expression in it is no answer.
    """
    text = _REASON.sub("", place.text)
    text = text if _has_math(text) else place.text
    expression = _last_expression(text, is_only=place.is_answer)
    whole = [text, _without_rest(text)] if place.is_answer else [text]
    yield from map(shown, [*whole, expression, _without_rest(expression)])


def _without_rest(text: str) -> str:
    """`5` of `5, so he has 5`; empty where the rest denies the answer, or has another one."""
    rest = _REST.search(text)
    if rest is None or not _has_math(text[: rest.start()]):
        return ""
    behind = text[rest.end() :]
    is_another = not rest[1] and (CHANGING.search(behind) or _has_math(behind))
    return "" if is_another else text[: rest.start()]


def _last_expression(sentence: str, *, is_only: bool) -> str:
    """The last run of words that look like mathematics, with what follows it.

    Empty where there is none, where words before it change its meaning (less than 5), and, with
    `is_only`, where there is another one, unless "is" stands between them.
    """
    before, expression = _split_last(sentence)
    if _REFUSED.search(_CLAUSE.split(before)[-1]):
        return ""
    is_another = is_only and _has_math(before) and not _COPULA.search(before)
    return "" if is_another else expression


def _split_last(text: str) -> tuple[str, str]:
    """What stands before the last run of words that look like mathematics, and from there on."""
    words = text.split()
    kinds = "".join(map(_kind, words))
    if words and words[-1].strip("().*") == "A":  # the last word is no article
        kinds = f"{kinds[:-1]}m"
    run = re.search(r"s?m([mcs]*m)?(?=[^m]*$)", kinds)
    start = run.start() if run else len(words)
    return " ".join(words[:start]), " ".join(words[start:])


def _kind(word: str) -> str:
    """Whether it is a sign, a connector, mathematics, or another word."""
    if word.lower() in ("minus", "negative"):
        return "s"
    return "m" if _is_math(word) else "c" if word.lower() in _CONNECTORS else "w"


def _has_math(text: str) -> bool:
    return any(map(_is_math, text.split()))


def _is_math(word: str) -> bool:
    return bool(_MATH_WORD.fullmatch(word.strip("*_`$.,;:!?()[]{}") or word))
