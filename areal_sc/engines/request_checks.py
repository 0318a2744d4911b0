"""What every engine refuses before it takes a request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Final

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.stop_strings import STOP_STRINGS, are_stop_strings
from areal_sc.errors import ConfigError, PromptTooLong, WorkflowError

ANY_TOKEN: Final = 1 << 31
"""Size of a vocabulary that is not known."""

MAX_TOLD: Final = 1 << 18
"""The most probable tokens that one answer tells, at all places together: a message holds them."""


def check_prompt(input_ids: Sequence[int], *, vocab_size: int, max_context_tokens: int) -> None:
    """Raises WorkflowError: the prompt is no tokens, empty, too long, or holds an unknown token."""
    try:
        input_ids = [index(token) for token in input_ids]
    except TypeError as error:
        raise WorkflowError(f"expected a prompt's token ids: {error}") from None
    if len(input_ids) == 0:
        raise WorkflowError("the prompt is empty: generation needs at least one token")
    if len(input_ids) >= max_context_tokens:
        raise PromptTooLong(
            f"the prompt has {len(input_ids)} tokens and leaves no room for a completion in the "
            f"context of {max_context_tokens} tokens (rollout.max_context_tokens)"
        )
    low, high = min(input_ids), max(input_ids)
    if low < 0 or high >= vocab_size:
        raise WorkflowError(
            f"the prompt holds token ids {low}..{high}, the model has 0..{vocab_size - 1}"
        )


def check_request(
    input_ids: Sequence[int],
    sampling: GenerationConfig,
    *,
    vocab_size: int,
    max_context_tokens: int,
) -> tuple[int, str]:
    """Checks a request; returns the most tokens of its answer, and the reason to end with these.

    Raises: WorkflowError: see `check_prompt`. ConfigError: see `check_sampling`.
    """
    check_prompt(input_ids, vocab_size=vocab_size, max_context_tokens=max_context_tokens)
    check_sampling(sampling)
    room = max_context_tokens - len(input_ids)
    if sampling.max_new_tokens <= room:
        return sampling.max_new_tokens, "length"
    return room, "context"


def check_top(top_k_logprobs: int, num_tokens: int) -> None:
    """Raises ConfigError: so many of the most probable tokens are told at no place.

    Args:
        num_tokens: at which they are asked for, at most.
    """
    most = MAX_TOLD // num_tokens
    if not 0 <= top_k_logprobs <= most:
        raise ConfigError(
            f"top_k_logprobs: expected 0 to {most} with {num_tokens} tokens, got {top_k_logprobs}"
        )


def check_sampling(sampling: GenerationConfig) -> None:
    """Raises ConfigError for a setting that no distribution has."""
    for name, is_possible, allowed in (
        ("max_new_tokens", sampling.max_new_tokens >= 1, ">= 1"),
        ("min_new_tokens", sampling.min_new_tokens >= 0, ">= 0"),
        ("temperature", 0 <= sampling.temperature < math.inf, ">= 0"),
        ("top_p", 0 < sampling.top_p <= 1, "in (0, 1]"),
        ("top_k", sampling.top_k >= 0, ">= 0"),
        ("stop", are_stop_strings(sampling.stop), STOP_STRINGS),
    ):
        if not is_possible:
            raise ConfigError(
                f"generation.{name} must be {allowed}, got {getattr(sampling, name)!r}"
            )
