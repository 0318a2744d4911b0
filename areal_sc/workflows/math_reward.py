"""Rewards for questions with a known answer: 1 where the completion has it, else 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any

from areal_sc.rewards.answer_text import (
    ReferenceReward,
    read_all,
    right_answer_of,
    without_reasoning,
)
from areal_sc.rewards.base import declare_reward
from areal_sc.rewards.math.answer import Answer, plain_words, read_answer
from areal_sc.rewards.math.compare import are_equal, is_parsable, library_verdict, warm_up
from areal_sc.rewards.math.place import AnswerPlace, candidates, final_answer, plain_signs, shown

TIME_LIMIT_S = 5.0
"""CPU seconds of one completion; most take milliseconds. What takes longer is not the answer."""

_WORDS = re.compile(r"[\s*$(]*(?:\\text\s*\{[^{}]+\}|[^\W\d_]{2,}(?:[ '-][^\W\d_]+)*)[\s*$.)]*")


class Reading(StrEnum):
    """How a completion is read: by the rules of docs/rewards.md, or by math-verify's alone."""

    strict = "strict"
    math_verify = "math_verify"


class WholeMatch(ReferenceReward):
    """1.0 where the completion is `prompt["answer"]`, reasoning and white space around it aside."""

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(without_reasoning(completion).strip() == self.reference(prompt))

    def reference(self, row: Mapping[str, Any]) -> str:
        """The answer as it is, a number as it is written."""
        return str(right_answer_of(row)).strip()


exact_match = WholeMatch()


class NumericMatch(ReferenceReward):
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
        if self.reading is Reading.math_verify:
            return library_verdict(str(right_answer_of(prompt)), completion)
        reference = self.reference(prompt)
        try:
            return float(_is_right(reference, completion))
        except Exception:  # sympy raises whatever it likes over what a model writes
            return 0.0

    def reference(self, row: Mapping[str, Any]) -> Answer:
        """The row's right answer, read strictly."""
        return _read_reference(str(right_answer_of(row)))

    def vote(self, completion: str) -> str | None:
        """The final answer as it was read; equal ones in other words are other votes."""
        for part in candidates(final_answer(completion)[0]):
            if (answer := read_answer(part)) is not None:
                return f"{answer.kind} {answer.latex}"
        return None


numeric_match = NumericMatch()
"""The strict reading."""


def check_answers(rows: Iterable[Mapping[str, Any]]) -> None:
    """Reads the reference answers of all rows, so that none fails during the run.

    Raises: ConfigError: some cannot be read; names the first of them, with their indices.
    """
    read_all(rows, numeric_match.reference, "{num} reference answers")


@lru_cache(maxsize=256)  # the completions of a group share it
def _read_reference(text: str) -> Answer:
    """The reference as mathematics, or, where it has letters alone, as words.

    Raises: ValueError: it is neither.
    """
    place = final_answer(text)[0]
    content = shown(place.text) if place.is_answer else plain_signs(text)
    answer = _read(place) if place.is_answer else read_answer(content)
    if answer is None and _WORDS.fullmatch(content):
        return Answer(plain_words(content), "words")
    if answer is None or not is_parsable(answer):
        raise ValueError(
            f"the reference answer {text!r} cannot be parsed: expected a number, an "
            "expression, a list, a tuple, a set, or a word"
        )
    return answer


def _is_right(gold: Answer, completion: str) -> bool:
    """Whether the final answer is the reference, and no prose behind it gives another one."""
    places = final_answer(completion)
    if gold.kind == "words":
        return plain_words(shown(places[0].text)) == gold.latex
    given, *others = map(_read, places)
    if given is None or not are_equal(gold, given):
        return False
    return all(other is None or are_equal(gold, other) for other in others)


def _read(place: AnswerPlace) -> Answer | None:
    return next(filter(None, map(read_answer, candidates(place))), None)
