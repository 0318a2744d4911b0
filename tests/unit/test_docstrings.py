"""The first sentence of every docstring names what it explains, or has a subject and a verb."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import areal_sc

PACKAGE = Path(areal_sc.__file__).parent

FRAGMENT = re.compile(r"\s*(?:Of|As|Those|That|Who|Whose|So)\b")
QUOTED = re.compile(rf"[\"']{FRAGMENT.pattern}")
"""Tells which few files have to be parsed."""


def test_no_docstring_begins_with_a_word_that_leaves_out_its_subject() -> None:
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {text!r:.60}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if QUOTED.search(source := path.read_text(encoding="utf-8"))
        for line, text in _docstrings(source)
        if FRAGMENT.match(text)
    ]
    assert not found, "these docstrings do not name what they explain:\n" + "\n".join(found)


def test_docstrings_of_attributes_and_constants_are_read_too() -> None:
    source = """
'Module.'
X = 1
'Constant.'
class C:
    'Class.'
    y: int
    'Attribute.'
    def f(self):
        'Function.'
        return 'No docstring.'
"""
    texts = {text for _, text in _docstrings(source)}
    assert texts == {"Module.", "Constant.", "Class.", "Attribute.", "Function."}


def _docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each string that is a statement: that of a module, class, function, or the
    one behind a constant or attribute."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text)), lineno=line):
                yield line, text
