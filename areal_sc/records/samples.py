"""Samples: the best and the worst answers to some prompts, as text for people."""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct


class Place(StrEnum):
    """Where an answer stands in its group, by reward.

    best, worst: of answers with different rewards.
    equal: all answers of the group have this reward.
    """

    best = "best"
    worst = "worst"
    equal = "equal"


class Sample(Struct, frozen=True, kw_only=True):
    """One row of a trained batch, as text.

    Attributes:
        step: the training step, from 1.
        group: id of the group, that is of the prompt.
        reward: of this row.
        group_reward: mean over the rows of the group.
        metrics: what the workflow reports of the row.
        num_tokens: of prompt and answer together.
        first_version, last_version: policy versions that sampled the first and the last token.
        staleness: of the first token, in policy versions.
        prompt: what stands before the first sampled token, with special tokens.
        answer: all that follows; in several turns also what the model was given between them.
        output: what the episode wrote, as an agent does; "" for none.
        pictures: kind and size of each one of the prompt.
    """

    step: int
    group: int
    place: Place
    reward: float
    group_reward: float
    metrics: dict[str, float]
    num_tokens: int
    first_version: int
    last_version: int
    staleness: int
    prompt: str
    answer: str
    output: str = ""
    pictures: tuple[str, ...] = ()


def shortened(text: str, max_chars: int) -> str:
    """A text, or the beginning and the end of a longer one, and how much is left out between."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    num_left_out = len(text) - 2 * half
    return f"{text[:half]} [... {num_left_out} characters ...] {text[-half:]}"
