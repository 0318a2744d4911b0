"""What a completion answers, as its reward tells it."""

from __future__ import annotations

from typing import Any

import pytest

from areal_sc.rewards.base import voter_of
from areal_sc.workflows.math_reward import numeric_match


def silent(prompt: dict[str, Any], completion: str) -> float:
    """Tells no votes."""
    return 0.0


@pytest.mark.parametrize(
    ("completion", "same"),
    [
        (r"so it is \boxed{12}", "The answer is 12."),
        (r"\boxed{x = 3}", r"#### $x=3$"),
    ],
)
def test_votes_of_mathematics(completion: str, same: str) -> None:
    assert numeric_match.vote(completion) == numeric_match.vote(same) is not None


def test_votes_of_other_answers_are_others() -> None:
    assert numeric_match.vote(r"\boxed{12}") != numeric_match.vote(r"\boxed{13}")
    assert numeric_match.vote("I give up") is None


def test_of_several_rewards_the_first_that_tells_does() -> None:
    assert voter_of(silent) is None
    rewards = {"length": (silent, 0.5), "right": numeric_match}
    assert voter_of(rewards) is numeric_match
