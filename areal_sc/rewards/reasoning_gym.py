"""The reward of tasks of reasoning-gym: the verdict of the library's own verifier. No torch.

    row ──► task, settings, entry ──┐
    completion ──► its answer ──────┴──► score_answer ──► 0.0 to 1.0

Nine verifiers run an answer as Python, by `eval` or by sympy's parser, which calls it: so a model
could patch the verifier. Here lists are read as literals, and formulas have numbers, operators and
mathematical functions alone; any other answer is wrong. Five verifiers look at a part of an answer
and take wrong ones; `_is_fooled` knows them.
"""

from __future__ import annotations

import re
import resource
import sys
from ast import literal_eval
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from areal_sc.errors import WorkflowError
from areal_sc.rewards.answer_text import given_answer
from areal_sc.rewards.base import declare_reward
from areal_sc.sources.reasoning_gym import (
    COLUMN,
    PREFIX,
    library_task,
)
from areal_sc.sources.reference import Referable
from areal_sc.sources.values import from_json, from_wire, to_json, to_wire

TIME_LIMIT_S: Final = 5.0
"""CPU seconds of one completion, as of mathematics; most verdicts take less than a millisecond."""

LISTS: Final = frozenset(["binary_matrix", "n_queens", "spiral_matrix", "string_insertion"])
"""Tasks whose verifiers read an answer that is a list by `eval`."""

FORMULAS: Final = frozenset(
    (
        *("countdown", "intermediate_integration", "polynomial_multiplication"),
        *("puzzle24", "simple_integration"),
    )
)
"""Tasks whose verifiers read an answer by sympy's parser."""

_NUMBER_GAMES: Final = frozenset(("countdown", "puzzle24"))
"""Of these formulas the answer has the numbers of the question, each once, and no names."""

_NEAR: Final = 1e-4
"""How far an answer of `coin_flip` may be off, as the library has it."""

_MEMORY: Final = 2**30
"""Bytes that a verifier may take: one of them writes out `R2000000000`, so many turns of a cube."""

_FORMULA: Final = re.compile(r"[A-Za-z\d\s+\-*/^().,]*", re.ASCII)
_ATTRIBUTE: Final = re.compile(r"\.\s*[A-Za-z]")
_NAME: Final = re.compile(r"[A-Za-z][A-Za-z\d]*")
_FUNCTIONS: Final = frozenset(
    (
        *("sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan"),
        *("sinh", "cosh", "tanh", "exp", "log", "ln", "sqrt", "pi"),
    )
)


def _warm_up() -> None:
    """Imports the library, which takes seconds at the first time."""
    import_module("reasoning_gym.factory")


class ReasoningGymReward(Referable):
    """What the library's verifier of a row's task gives the answer of a completion, 0.0 to 1.0.

    Many verifiers give a part of 1.0 where the right answer stands in a longer text, or is of
    another form. Reasoning (`<think>...</think>`) is no answer. An answer over which the verifier
    raises, or takes more than `TIME_LIMIT_S`, gets 0.0.

    Args:
        tag: the answer is what stands in the last `<tag>...</tag>`, and without one there is no
            answer; "": it is all that the completion says behind its reasoning.
    Raises: ValueError: in a call: the row is none of `load_prompts("reasoning_gym:...")`.
        WorkflowError: in a call: the library is not installed, or has no such task.
    """

    def __init__(self, *, tag: str = "") -> None:
        self.tag = tag
        declare_reward(late_reward=0.0, late_after_s=TIME_LIMIT_S, prepare=_warm_up)(self)

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        if fault := _fault_of(prompt):
            raise ValueError(fault)
        answer = self.vote(completion)
        if answer is None:
            return 0.0
        verified = prompt[COLUMN]
        task, reference = verified["task"], prompt["answer"]
        if task in FORMULAS and not _is_plain_formula(answer, reference):
            return 0.0
        if _is_fooled(task, answer, reference, verified["metadata"]):
            return 0.0
        verifier = _verifier(task, to_json(to_wire(verified["settings"])))
        entry = {"question": prompt["question"], "answer": reference}
        try:
            with _bounded_memory():
                return float(
                    verifier.score_answer(answer, entry | {"metadata": verified["metadata"]})
                )
        except Exception:  # verifiers raise whatever they like over what a model writes
            return 0.0

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Raises: WorkflowError: it is no row of the library's."""
        if fault := _fault_of(row):
            raise WorkflowError(fault)

    def vote(self, completion: str) -> str | None:
        """The answer of a completion; None: there is none."""
        given = given_answer(completion, self.tag)
        return None if given is None else given.strip() or None


reasoning_gym_reward = ReasoningGymReward()
"""The whole completion is the answer, but for its reasoning."""


def _fault_of(row: Mapping[str, Any]) -> str:
    """Why a row cannot be verified; "": it can."""
    missing = [it for it in ("question", "answer", COLUMN) if it not in row]
    if not missing:
        return ""
    return (
        f"the row has no column {missing[0]!r}, only {sorted(row)}: expected one of "
        f'load_prompts("{PREFIX}...")'
    )


def _is_plain_formula(answer: str, reference: str) -> bool:
    """Whether it holds nothing but numbers, operators, one-letter names and known ones.

    Args:
        reference: the right answer, whose names are known, too.
    """
    if not _FORMULA.fullmatch(answer) or _ATTRIBUTE.search(answer):
        return False
    known = _FUNCTIONS.union(_NAME.findall(reference))
    return all(len(name) == 1 or name in known for name in _NAME.findall(answer))


def _is_fooled(task: str, answer: str, reference: str, metadata: Mapping[str, Any]) -> bool:
    """Whether the answer is wrong, but might be right to the verifier, which looks at a part."""
    if task in _NUMBER_GAMES:
        numbers = sorted(map(int, re.findall(r"\d+", answer)))
        return numbers != sorted(metadata["numbers"]) or any(map(str.isalpha, answer))
    if task == "complex_arithmetic":
        return "nan" in answer.lower()
    if task == "game_of_life_halting":
        return answer.lower() != reference.lower()
    if task == "coin_flip":  # a number that has the first digits alone
        try:
            return abs(float(Fraction(answer) - Fraction(reference))) > _NEAR
        except (ValueError, ZeroDivisionError, OverflowError):
            return True
    return False


@contextmanager
def _bounded_memory() -> Iterator[None]:
    """Within it Python raises MemoryError where the process would take `_MEMORY` more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _MEMORY
    if resource.RLIM_INFINITY not in (soft, hard):
        limit = min(limit, soft, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@lru_cache(maxsize=256)
def _verifier(task: str, settings: bytes) -> Any:
    """The library's task. Args: settings: as JSON of their wire form."""
    made = library_task(task, from_wire(from_json(settings)))
    if task in LISTS:
        vars(sys.modules[type(made).__module__])["eval"] = literal_eval
    return made
