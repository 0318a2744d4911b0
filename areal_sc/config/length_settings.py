"""A soft limit of an answer's length."""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.config.fields import setting


@dataclass
class SoftLengthConfig:
    """Takes from the reward of a row whose sampled tokens come near a limit (DAPO)."""

    limit_tokens: int = setting(0, "sampled tokens of a row that cost all of penalty; 0: off", ge=0)
    margin_tokens: int = setting(0, "tokens before limit_tokens in which the cost grows", ge=0)
    penalty: float = setting(1.0, "most that is taken from a reward", gt=0)
