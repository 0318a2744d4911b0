"""Rewards for questions with a known answer: 1 where the completion has it, else 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

from areal_sc.errors import ConfigError
from areal_sc.workflows.base import declare_reward
from areal_sc.workflows.math_answer import Answer, Words, plain_layout, plain_words, read_answer
from areal_sc.workflows.math_compare import are_equal, check_parsable, library_verdict, warm_up
from areal_sc.workflows.math_place import Place, Prose, final_answer
from areal_sc.workflows.math_prose import candidates, has_mathematics
from areal_sc.workflows.reference import Referable

TIME_LIMIT_S = 5.0
"""CPU seconds of one completion; most take milliseconds. What takes longer is not the answer."""

_MAX_NAMED = 5


class Reading(StrEnum):
    """How a completion is read: by the rules of docs/rewards.md, or by math-verify's alone."""

    strict = "strict"
    math_verify = "math_verify"


def exact_match(prompt: Mapping[str, Any], completion: str) -> float:
    """1.0 where the completion is `prompt["answer"]`, white space around it aside."""
    return float(completion.strip() == _answer_of(prompt).strip())


class NumericMatch(Referable):
    """1.0 where the completion's one final answer equals `prompt["answer"]`; docs/rewards.md.

    Args:
        reading: `strict` finds the answer and reads it by the rules of docs/rewards.md.
            `math_verify` is math-verify's own verdict, `verify(parse(answer), parse(completion))`,
            to compare with published results.
    Raises: ValueError: `reading` is none of these; in a call: the reference answer cannot be read.
    """

    def __init__(self, reading: str = Reading.strict) -> None:
        self.reading = Reading(reading)
        declare_reward(late_reward=0.0, late_after_s=TIME_LIMIT_S, prepare=warm_up)(self)

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        gold = _answer_of(prompt)
        if self.reading is Reading.math_verify:
            return library_verdict(gold, completion)
        reference = _read_reference(gold)
        try:
            return float(_is_right(reference, final_answer(completion)))
        except Exception:  # sympy raises whatever it likes over what a model writes
            return 0.0


numeric_match = NumericMatch()
"""The strict reading."""


def check_answers(rows: Iterable[Mapping[str, Any]]) -> None:
    """Reads the reference answers of all rows, so that none fails during the run.

    Raises: ConfigError: some cannot be read; names the first of them, with their indices.
    """
    faults = []
    for index, row in enumerate(rows):
        if "answer" not in row:
            faults.append(f"row {index} has no 'answer', only {sorted(row)}")
            continue
        try:
            _read_reference(_answer_of(row))
        except ValueError as error:
            faults.append(f"row {index}: {error}")
    if faults:
        named = faults[:_MAX_NAMED]
        if len(faults) > _MAX_NAMED:
            named.append(f"and {len(faults) - _MAX_NAMED} more")
        raise ConfigError(
            "\n  ".join([f"{len(faults)} reference answers cannot be read:", *named])
            + "\nexpected a number, an expression, a list, a tuple, a set, or a word; "
            "mend these rows, or leave them out"
        )


def _answer_of(row: Mapping[str, Any]) -> str:
    """Raises: ValueError: it is missing; the word None is no answer."""
    if row["answer"] is None:
        raise ValueError("the reference answer is missing (null)")
    return str(row["answer"])


@lru_cache(maxsize=256)  # the completions of a group share it
def _read_reference(text: str) -> Answer:
    """The reference as mathematics, or, where it has letters alone, as words.

    Raises: ValueError: it is neither.
    """
    place = final_answer(text)
    content = text if place.marked is None else place.marked
    words = plain_words(content)
    if "\\" not in plain_layout(content) and re.fullmatch(
        r"[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*", words
    ):
        return Words(words)
    answer = read_answer(content) or _read_marked(place) or _read_said(place.prose)
    if answer is None and re.fullmatch(r"\s*\\text\s*\{[^{}]+\}\s*", content):
        return Words(words)
    try:
        if answer is None:
            raise ValueError("neither mathematics nor words")
        check_parsable(answer)
    except ValueError as error:
        raise ValueError(f"the reference answer {text!r} cannot be parsed") from error
    return answer


def _is_right(gold: Answer, place: Place) -> bool:
    """Whether what is marked is the reference, and the prose behind it gives no other answer."""
    if isinstance(gold, Words):
        return gold.latex in map(plain_words, _places_of_words(place))
    said = _read_said(place.prose)
    if place.marked is None:
        given = said if said is not None else _read_last(place.prose)
        return given is not None and are_equal(gold, given)
    given = _read_marked(place)
    if given is None or not are_equal(gold, given):
        return False
    return said is None or are_equal(gold, said)


def _places_of_words(place: Place) -> list[str]:
    if place.marked is not None:
        return [place.marked, Prose.of(place.marked).last_sentence().with_formulas()]
    if said := place.prose.marked():
        return [said[0].with_formulas()]
    return [place.prose.with_formulas(), place.prose.last_sentence().with_formulas()]


def _read_marked(place: Place) -> Answer | None:
    if place.marked is None:
        return None
    inner = Prose.of(place.marked)
    return read_answer(place.marked) or _read_said(inner) or _read_first(inner, is_only=True)


def _read_said(prose: Prose) -> Answer | None:
    """What the last "the answer is" gives, of those with mathematics behind them if there are."""
    said = prose.marked()
    last = next(filter(has_mathematics, said), said[0] if said else None)
    return None if last is None else _read_first(last, is_only=True)


def _read_last(prose: Prose) -> Answer | None:
    return None if prose.marked() else _read_first(prose.last_sentence(), is_only=False)


def _read_first(sentence: Prose, *, is_only: bool) -> Answer | None:
    parts = candidates(sentence, is_only=is_only)
    return next((answer for part in parts if (answer := read_answer(part)) is not None), None)
