"""Rewards for questions with a known answer: 1 where the completion has it, else 0."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from areal_sc.errors import ConfigError
from areal_sc.workflows.base import declare_reward
from areal_sc.workflows.math_answer import (
    Answer,
    final_answer,
    last_expression,
    last_sentence,
    read_answer,
    read_first_clause,
)
from areal_sc.workflows.math_compare import are_equal, check_parsable, warm_up
from areal_sc.workflows.math_notation import plain_words

TIME_LIMIT_S = 5.0
"""CPU seconds of one completion; most take milliseconds. What takes longer is not the answer."""

_MAX_NAMED = 5


def exact_match(prompt: Mapping[str, Any], completion: str) -> float:
    """1.0 where the completion is `prompt["answer"]`, white space around it aside."""
    return float(completion.strip() == str(prompt["answer"]).strip())


@declare_reward(late_reward=0.0, late_after_s=TIME_LIMIT_S, prepare=warm_up)
def numeric_match(prompt: Mapping[str, Any], completion: str) -> float:
    """1.0 where the completion's one final answer equals `prompt["answer"]`.

    The final answer is what stands behind the last `\\boxed{}`, `####` or "answer is"; without
    them, the last expression of the last sentence. See docs/rewards.md for what is equal.

    Raises: ValueError: the reference answer cannot be read.
    """
    gold = _read_reference(str(prompt["answer"]))
    if isinstance(gold, str):
        marked = final_answer(completion)
        text = completion if marked is None else marked
        return float(gold in (plain_words(text), plain_words(last_sentence(text))))
    given = _given_answer(completion)
    try:
        return float(given is not None and are_equal(gold, given))
    except Exception:  # sympy raises whatever it likes over what a model writes
        return 0.0


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
            _read_reference(str(row["answer"]))
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


def _read_reference(text: str) -> Answer | str:
    """The reference as mathematics, or, where it has letters alone, as words.

    Raises: ValueError: it is neither.
    """
    marked = final_answer(text)
    content = text if marked is None else marked
    answer = read_answer(content) or (read_first_clause(content) if marked is not None else None)
    words = plain_words(content)
    if answer is None and re.fullmatch(r"[^\W\d_]+(?:[ '-][^\W\d_]+)*", words):
        return words
    try:
        if answer is None:
            raise ValueError("neither mathematics nor words")
        check_parsable(answer)
    except ValueError as error:
        raise ValueError(f"the reference answer {text!r} cannot be parsed") from error
    return answer


def _given_answer(completion: str) -> Answer | None:
    """The one answer that the completion gives, None where none is understood."""
    marked = final_answer(completion)
    if marked is not None:
        expression = last_expression(marked, is_only=True)
        return read_answer(marked) or read_first_clause(marked) or read_first_clause(expression)
    sentence = last_sentence(completion)
    expression = last_expression(sentence)
    return read_answer(sentence) or read_answer(expression) or read_first_clause(expression)
