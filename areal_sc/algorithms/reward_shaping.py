"""Rewards that depend on an answer's length. No torch."""

from __future__ import annotations


def soft_length_penalty(num_tokens: int, max_tokens: int, margin: int) -> float:
    """What is added to the reward of an answer that comes near the longest allowed length.

    0 up to max_tokens - margin; from there it falls to -1 at max_tokens, and stays -1 beyond:
    ((max_tokens - margin) - num_tokens) / margin.
    Source: DAPO, arXiv:2503.14476, eq. 13 (soft overlong punishment).

    Args:
        num_tokens: of the answer.
        max_tokens, margin: L_max and L_cache; 0 < margin <= max_tokens.
    Raises: ValueError: the margin is none.
    """
    if not 0 < margin <= max_tokens:
        raise ValueError(f"margin={margin}: expected 1 to max_tokens={max_tokens}")
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - margin)) / margin))
