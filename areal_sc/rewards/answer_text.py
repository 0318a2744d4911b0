"""What of a completion is its answer, and what of a row is the right one. No torch.

Rewards that look for an answer read completions by these rules:

    <think>Or Rome?</think>            reasoning gives no answer, also where it is cut off
    <answer>Paris</answer> or          marks with only "or", "and" or signs between them are several
    <answer>Lyon</answer>              answers, none of which is the one
    <answer>Paris</answer>             of others the last one counts
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.sources.reference import Referable
from areal_sc.sources.values import is_missing

_REASONING: Final = re.compile(r"<(/?)(?:think|thinking|thought|reasoning)>", re.IGNORECASE)
_MAX_NAMED: Final = 5
_BETWEEN: Final = re.compile(
    r"(?:\W|\\\w+|</?answer>)*|(?=.*\b(?:and|or)\b)(?:[^.\n]|\.(?=\d)){0,60}", re.DOTALL
)


def without_reasoning(text: str) -> str:
    """The text behind the last `</think>` and before a `<think>` that is not closed."""
    start = max((tag.end() for tag in _REASONING.finditer(text) if tag[1]), default=0)
    opened = _REASONING.search(text, start)
    return text[start : opened.start() if opened else len(text)]


def last_together(text: str, marks: Sequence[tuple[int, int, str]]) -> list[str]:
    """What the last mark holds, and those before it that are one list with it, in order.

    Args: marks: start, end and content of each, in order; at least one.
    """
    *others, (start, _, content) = marks
    contents = [content.strip()]
    while others and _BETWEEN.fullmatch(text[others[-1][1] : start]):
        start, _, content = others.pop()
        contents.insert(0, content.strip())
    return list(dict.fromkeys(contents))


def given_answer(completion: str, tag: str) -> str | None:
    """What the last `<tag>...</tag>` holds, all that it holds with others where it is one of a
    list; None: there is no answer. Of tag "" it is all that stands behind the reasoning."""
    text = without_reasoning(completion)
    if not tag:
        return text
    name = re.escape(tag)
    found = re.finditer(rf"<{name}>(.*?)</{name}>", text, re.DOTALL)
    marks = [(it.start(), it.end(), it[1]) for it in found]
    return ", ".join(last_together(text, marks)) if marks else None


def right_answer_of(row: Mapping[str, Any]) -> Any:
    """The right answer of a row.

    Raises: ValueError: there is none; a null is none, and so is the NaN that pandas writes.
    """
    if "answer" not in row:
        raise ValueError(f"the row has no 'answer', only {sorted(row)}")
    if is_missing(row["answer"]):
        raise ValueError(
            f"the reference answer is missing ({'null' if row['answer'] is None else 'NaN'})"
        )
    return row["answer"]


def read_all(rows: Iterable[Mapping[str, Any]], read: Callable[..., Any], failed: str) -> None:
    """Reads something of all rows, so that none fails during the run.

    Args: failed: what is told of rows that `read` refuses by a ValueError, `{num}` of them.
    Raises: ConfigError: there are some; it names the first of them, with their indices.
    """
    faults = []
    for index, row in enumerate(rows):
        try:
            read(row)
        except ValueError as error:
            faults.append(f"row {index}: {error}")
    if faults:
        further = len(faults) - _MAX_NAMED
        named = [*faults[:_MAX_NAMED], *[f"and {further} more"] * (further > 0)]
        told = "\n  ".join([f"{failed.format(num=len(faults))} cannot be read:", *named])
        raise ConfigError(f"{told}\nmend these rows, or leave them out")


class ReferenceReward(Referable):
    """Base of rewards that compare an answer with the row's; rows are looked at before the run."""

    @abstractmethod
    def reference(self, row: Mapping[str, Any]) -> Any:
        """The row's right answer, or all of them, in the form that answers are compared in.

        Raises: ValueError: there is none, or none that an answer could be compared with.
        """

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises: WorkflowError: it has no reference that an answer could be compared with."""
        try:
            self.reference(row)
        except ValueError as error:
            raise WorkflowError(str(error)) from error
