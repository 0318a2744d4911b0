"""The program of an answer: its last fenced code block in a known language. No torch.

Reasoning (`<think>...</think>`) gives no program, and neither does a block that is not closed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from textwrap import dedent
from typing import Final

from areal_sc.rewards.answer_text import without_reasoning

PYTHON: Final = frozenset(("", "py", "py3", "python", "python3"))
"""Names of Python behind a fence; a block without a name is Python."""

_TAG: Final = re.compile(r"^[ \t]*</?[\w|]+>(?=[ \t]*[`~]{3})|(?<=[`~]{3})[ \t]*</?[\w|]+>[ \t]*$")
"""A tag that is glued to a fence, as of `<answer>`."""
_FENCE: Final = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block. Attributes: language: as behind its fence, in lower case."""

    language: str
    code: str


def last_program(completion: str, languages: Collection[str] = ()) -> CodeBlock | None:
    """The last code block that is Python or has one of these names; None: there is none."""
    known = PYTHON.union(languages)
    blocks = [
        block for block in code_blocks(without_reasoning(completion)) if block.language in known
    ]
    named = [block for block in blocks if block.language]  # others may be sample outputs
    return next(reversed(named or blocks), None)


def code_blocks(text: str) -> Iterator[CodeBlock]:
    """The closed blocks with code, in order; a fence in a longer one's block is a line of it."""
    fence, language, lines = "", "", list[str]()
    for line in text.split("\n"):
        line = _TAG.sub("", line) if "`" in line or "~" in line else line
        mark = _FENCE.match(line)
        if not fence and mark and "`" not in line[mark.end(1) :]:
            fence, language, lines = mark[1], mark[2].lower(), []
        elif mark and mark[1].startswith(fence) and not line[mark.end(1) :].strip():
            if code := dedent("\n".join(lines)).strip("\n"):
                yield CodeBlock(language, code)
            fence = ""
        elif fence:
            lines.append(line)
