"""Rewards for the shape of a completion: its format, and what it says again and again. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

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
    Raises: ValueError: there is no tag, or one of them twice.
    """

    def __init__(
        self, tags: Sequence[str], *, opened: bool = False, is_free_behind: bool = False
    ) -> None:
        if not tags or len(set(tags)) < len(tags):
            raise ValueError(f"tags={list(tags)}: expected at least one, and none of them twice")
        names = [re.escape(tag) for tag in tags]
        inside = rf"(?:(?!</?(?:{'|'.join(names)})>).)*"
        whole = r"\s*".join(rf"<{name}>{inside}</{name}>" for name in names)
        if opened:
            whole = whole.removeprefix(f"<{names[0]}>")
        end = inside if is_free_behind else r"\s*"
        self._whole = re.compile(rf"\s*{whole}{end}", re.DOTALL)

    def __call__(self, prompt: Mapping[str, Any], completion: str) -> float:
        return float(self._whole.fullmatch(completion) is not None)


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
