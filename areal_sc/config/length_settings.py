"""What the length of an answer does to its reward: a soft limit, and answers that are cut."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal_sc.config.fields import setting


class CutAnswers(StrEnum):
    """What an answer counts that did not end by itself: `max_new_tokens` or the context cut it.

    wrong: its accuracy is 0, and its reward 0 at most.
    paid: its accuracy is 0; its reward is what the workflow says.
    judged: both are what the workflow says.
    """

    wrong = "wrong"
    paid = "paid"
    judged = "judged"

    @property
    def is_inaccurate(self) -> bool:
        """Whether its accuracy is 0, whatever the workflow says."""
        return self is not CutAnswers.judged


@dataclass
class SoftLengthConfig:
    """Takes from the reward of a row whose sampled tokens come near a limit (DAPO)."""

    limit_tokens: int = setting(0, "sampled tokens of a row that cost all of penalty; 0: off", ge=0)
    margin_tokens: int = setting(
        0, "tokens before limit_tokens in which the cost grows", ge=0, idle=("limit_tokens=0",)
    )
    penalty: float = setting(
        1.0, "most that is taken from a reward", gt=0, idle=("limit_tokens=0",)
    )
