"""Rewards for the shape of a completion: its format, and what it says again and again. No torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_sc.rewards.answer_text import without_reasoning
from areal_sc.rewards.base import DECLARATION, RewardFunction, is_async
from areal_sc.rewards.code.answer import code_blocks
from areal_sc.sources.reference import Referable


class TagFormat(Referable):
    """1.0 where the completion consists of these tags in this order, each once, else 0.0.

    `TagFormat(["think", "answer"])` takes `<think>...</think><answer>...</answer>`, with white
    space around the tags.

    Args:
        tags: their names.
        opened: the prompt ends with the first tag, as chat templates of thinking models do: the
            completion begins behind it.
        is_free_behind: any text without these tags may follow the last one.
        part_credit: what a completion without the whole format may get, in [0, 1): it times the
            share of the marks, such as `<think>` and `</think>`, that stand there once.
    Raises: ValueError: there is no tag, or one of them twice; or the credit is out of bounds.
    """

    def __init__(
        self,
        tags: Sequence[str],
        *,
        opened: bool = False,
        is_free_behind: bool = False,
        part_credit: float = 0.0,
    ) -> None:
        if not 0 <= part_credit < 1:
            raise ValueError(f"part_credit={part_credit}: expected a number in [0, 1)")
        if not tags or len(set(tags)) < len(tags):
            raise ValueError(f"tags={list(tags)}: expected at least one, and none of them twice")
        names = [re.escape(tag) for tag in tags]
        inside = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
        whole = r"\s*".join(rf"<{name}>{inside}</{name}>" for name in names)
        if opened:
            whole = whole.removeprefix(f"<{names[0]}>")
        end = inside if is_free_behind else r"\s*"
        self._whole = re.compile(rf"\s*{whole}{end}", re.DOTALL)
        marks = [mark for tag in tags for mark in (f"<{tag}>", f"</{tag}>")]
        self._marks = marks[1:] if opened else marks
        self._part_credit = part_credit

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        if self._whole.fullmatch(completion) is not None:
            return 1.0
        num_once = sum(completion.count(mark) == 1 for mark in self._marks)
        return self._part_credit * num_once / len(self._marks)


class CodeBlockFormat(Referable):
    """1.0 where the answer, reasoning left out, has a closed fenced block of code, else 0.0.

    Args:
        languages: what may stand behind the opening fence, in lower case; empty: anything.
    """

    def __init__(self, languages: Sequence[str] = ()) -> None:
        self.languages = frozenset(languages)

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        found = {block.language for block in code_blocks(without_reasoning(completion))}
        return float(bool(found & self.languages if self.languages else found))


class CosineLength(Referable):
    """A reward of 1 or 0 that becomes less the longer a right answer is, and more a wrong one.

        from + (to - from) (1 - cos(pi L / max_chars)) / 2, L the characters of the completion

    So short right answers are worth most, and where the model is wrong it may think longer. What is
    longer than `max_chars` gets `too_long`.
    Its numbers say little of how many answers are right: give `accuracy` the reward itself, as
    `SingleTurnWorkflow({"right": (reward, 0), "length": CosineLength(reward, ...)},
    accuracy="right")`.
    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv:2502.03373, section 4.2,
    which counts tokens.

    Args:
        reward: a sync one; 1 or more is right.
        max_chars: > 0.
        right, wrong: from the shortest to the longest answer.
        too_long: of any longer one.
    Raises: ValueError: one of them is out of bounds, or the reward is async.
    """

    def __init__(
        self,
        reward: RewardFunction,
        *,
        max_chars: int,
        right: tuple[float, float] = (1.0, 0.5),
        wrong: tuple[float, float] = (-1.0, -0.5),
        too_long: float = -1.0,
    ) -> None:
        if max_chars < 1 or is_async(reward):
            raise ValueError(f"max_chars={max_chars}: expected > 0, and a reward that is not async")
        self._reward: Any = reward
        self._max_chars = max_chars
        self._ends = {True: tuple(right), False: tuple(wrong)}
        self._too_long = too_long
        if declaration := getattr(reward, DECLARATION, None):
            declaration(self)

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        if len(completion) > self._max_chars:
            return self._too_long
        start, end = self._ends[float(self._reward(prompt, completion)) >= 1.0]
        share = (1 - math.cos(math.pi * len(completion) / self._max_chars)) / 2
        return start + (end - start) * share

    def check_row(self, row: Mapping[str, Any]) -> None:
        """What the reward in it says of the row."""
        if check := getattr(self._reward, "check_row", None):
            check(row)


class RepetitionPenalty(Referable):
    """`-penalty` times the share of the completion's n-grams of words that have been there before.

    0.0 where no n-gram comes twice, or the completion has fewer than `n` words.
    Source: "Demystifying Long Chain-of-Thought Reasoning in LLMs", arXiv:2502.03373, appendix.

    Args:
        n: words of an n-gram, >= 1.
        penalty: > 0, the most that it takes.
    Raises: ValueError: one of them is out of bounds.
    """

    is_shaping = True

    def __init__(self, n: int = 3, penalty: float = 1.0) -> None:
        if n < 1 or not penalty > 0:
            raise ValueError(f"n={n}, penalty={penalty}: expected n >= 1 and penalty > 0")
        self.n = n
        self.penalty = penalty

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        words = completion.lower().split()
        grams = list(zip(*(words[start:] for start in range(self.n)), strict=False))
        return -self.penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
