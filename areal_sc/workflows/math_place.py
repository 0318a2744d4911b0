"""Where the answer stands in a text. Regular expressions and one scan; time is linear.

    text ── final_answer ──► the content of the last marks, and prose that gives an answer, too

Reasoning (`<think>...</think>`) gives no answer. A mark (a box, `####`, `<answer>`) is stronger
than prose ("the answer is"). Prose is kept with its formulas as single characters, so no rule for
prose sees a formula.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_ANSWER_CHARS: Final = 1000
_MAX_PROSE_CHARS: Final = 4000
"""Prose behind the last mark is read from so many characters before its end."""

FORMULA: Final = "\ue000-\uf8ff"
"""Characters that stand for a formula in prose; they have no other meaning in Unicode."""

_REASONING = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|(?=<answer>)|\Z)", re.IGNORECASE | re.DOTALL)
_HASHES = re.compile(r"####(?!#)\s*([^\n]*)")
_WORD_FIRST = re.compile(r"\**[A-Za-z]{2}")
_BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])(\s*)")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BETWEEN = re.compile(
    r"(?:[\s$,.;&]|\\[,;:! ()\[\]]|\\q?quad|\\text\w*|[{}]|</?answer>|#+|and\b|or\b)*|"
    r"(?=.*\b(?:and|or)\b)(?:[^.\n]|\.(?=\d)){0,60}",
    re.DOTALL,
)
_FORMULA = re.compile(
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|(?<!\\)\$(?=\S)(?:\\.|[^$\\\n])*(?<=\S)\$(?!\d)"
    r"|(?<!\\)\$ (?:\\.|[^$\\\n])* \$|\\begin\{(\w+\*?)\}.+?\\end\{\1\}",
    re.DOTALL,
)
_PROSE_MARK = re.compile(
    r"(?<!this )\banswer\b[^\n.:=]{0,40}?(?:\bis\b|\bare\b|[:=])(?:\*\*|[\s:])*"
    r"|\bfinal answer\b\**:?\**\s*\n",
    re.IGNORECASE,
)
_SENTENCE_END = re.compile(
    rf"\.(?=\s+[A-Z{FORMULA}])|(?:(?<![\d)}}!\\])!|\?)(?=\s|$)|\.\**\s*$", re.MULTILINE
)
_CONTENT = re.compile(rf"[\w{FORMULA}]")


@dataclass(frozen=True)
class Prose:
    """A text in which each delimited formula is one character of `FORMULA`."""

    text: str
    formulas: dict[int, str]

    @classmethod
    def of(cls, text: str) -> Prose:
        formulas: dict[int, str] = {}

        def mask(match: re.Match[str]) -> str:
            character = 0xE000 + len(formulas)
            formulas[character] = f" {match.group()} "
            return chr(character)

        return cls(_FORMULA.sub(mask, re.sub(f"[{FORMULA}]", "?", text)), formulas)

    def part(self, text: str) -> Prose:
        return Prose(text, self.formulas)

    def with_formulas(self) -> str:
        return self.text.translate(self.formulas)

    def last_sentence(self) -> Prose:
        """The last sentence of the last line that is not empty; none if that is a question."""
        lines = [line for line in self.text.splitlines() if _CONTENT.search(line)]
        is_question = not lines or re.search(r"\?[\s*_]*$", lines[-1])
        sentences = [] if is_question else _SENTENCE_END.split(lines[-1])
        return self.part(next((s for s in reversed(sentences) if _CONTENT.search(s)), "").strip())

    def marked(self) -> list[Prose]:
        """What follows each "the answer is": one sentence. The last one comes first."""
        marks = list(_PROSE_MARK.finditer(self.text))
        return [self.part(_first_sentence(self.text[mark.end() :])) for mark in reversed(marks)]


@dataclass(frozen=True)
class Place:
    """What stands at the last marks, None without a mark; and the prose behind them."""

    marked: str | None
    prose: Prose


def final_answer(text: str) -> Place:
    """Finds the marks of a completion; marks with only "and" or "or" between them are one list."""
    text = _without_reasoning(text)
    marks = _marks(text)
    end = max((mark[1] for mark in marks), default=0)
    prose = Prose.of(text[end:][-_MAX_PROSE_CHARS:])
    if not marks:
        return Place(None, prose)
    start, _, content = marks.pop()
    contents = [content]
    while marks and _BETWEEN.fullmatch(text[marks[-1][1] : start]):
        start, _, content = marks.pop()
        contents.insert(0, content)
    distinct = list(dict.fromkeys(content.strip() for content in contents))
    return Place(", ".join(contents if len(distinct) > 1 else distinct), prose)


def _without_reasoning(text: str) -> str:
    """The text behind the last `</think>` and before a `<think>` that is not closed."""
    start = 0
    for tag in _REASONING.finditer(text):
        if tag[1]:
            start = tag.end()
    opened = _REASONING.search(text, start)
    return text[start : opened.start() if opened else len(text)]


def _marks(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of each mark; a mark around others only says where they stand."""
    marks = _boxes(text) + [(tag.start(), tag.end(), tag[1]) for tag in _ANSWER.finditer(text)]
    last_line = text.rstrip().rfind("\n")
    for match in _HASHES.finditer(text):
        is_heading = _WORD_FIRST.match(match[1]) and match.start() < last_line
        if not is_heading:
            marks.append((match.start(), match.end(), _first_sentence(match[1])))
    marks.sort()
    starts = [start for start, _, _ in marks[1:]] + [len(text)]
    return [mark for mark, next_start in zip(marks, starts, strict=False) if mark[1] <= next_start]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """The outermost boxes; one that is not closed is empty."""
    closing, opened = {}, []
    for brace in _BRACE.finditer(text):
        if brace.group() == "{":
            opened.append(brace.start())
        elif brace.group() == "}" and opened:
            closing[opened.pop()] = brace.start()
    boxes: list[tuple[int, int, str]] = []
    end = 0
    for match in _BOX.finditer(text):
        if match.start() < end:
            continue
        at = match.end()
        if text[at : at + 1] == "{":
            end = closing.get(at, at) + 1
            content = text[at + 1 : end - 1]
        else:
            token = re.compile(r"[^\s{$.,;]*" if match[1] else "").match(text, at)
            end, content = (token.end(), token.group()) if token else (at, "")
        boxes.append((match.start(), end, content))
    return boxes


def _first_sentence(text: str) -> str:
    """The first sentence of the first line that is not empty, without a closing tag."""
    line = next((line for line in text.splitlines() if _CONTENT.search(line)), "")
    return _SENTENCE_END.split(line.strip().partition("</")[0])[0]
