"""What a reward is: a function, or several, and what a function says about itself. No torch."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Self, TypeAlias, TypeVar

RewardFunction = Callable[..., float | Awaitable[float]]
"""reward(prompt: dict, completion: str) -> float; sync (run in a killable process) or async."""

Reward: TypeAlias = RewardFunction | Mapping[str, RewardFunction | tuple[RewardFunction, float]]
"""One function; or several by name, each alone (weight 1) or with its weight.

    {"right": right, "length": (length, -0.01)}
"""

PART_PREFIX = "reward/"
"""Before the name of one of several reward functions, among the metrics of a workflow."""

DECLARATION = "areal_sc_declaration"
"""Attribute of a reward function that holds its `RewardDeclaration`."""

_Reward = TypeVar("_Reward", bound=RewardFunction)


@dataclass(frozen=True, kw_only=True)
class RewardDeclaration:
    """What a sync reward says about itself; a decorator, by the name of `declare_reward`.

    Without one, passing `rollout.reward_timeout_s` rejects the episode.

    Attributes:
        late_reward: what it means by taking long: no failure, but this number.
        late_after_s: CPU seconds of one call after which it is given. The process is killed.
        prepare: called once in each reward process, before its calls; its time is not limited by
            `rollout.reward_timeout_s`. For slow imports.
    """

    late_reward: float
    late_after_s: float
    prepare: Callable[[], None]

    def __call__(self, reward: _Reward) -> _Reward:
        setattr(reward, DECLARATION, self)
        return reward


declare_reward = RewardDeclaration


def vote_of(reward: Reward, completion: str) -> str | None:
    """What a completion answers, in words that equal answers share: for the most frequent answer.

    A reward tells it by a method, or an attribute, `vote(completion) -> str | None`; of several
    functions the first one that has it does.
    """
    functions = reward.values() if isinstance(reward, Mapping) else [reward]
    for given in functions:
        vote = getattr(given[0] if isinstance(given, tuple) else given, "vote", None)
        if vote is not None:
            told: str | None = vote(completion)
            return told
    return None


class Score(float):
    """A reward that knows what it is made of; a float like any other.

    Attributes:
        parts: by name, what each of several functions gave, before its weight; empty for one alone.
    """

    parts: Mapping[str, float]

    def __new__(cls, reward: float, parts: Mapping[str, float] | None = None) -> Self:
        score = super().__new__(cls, reward)
        score.parts = dict(parts or {})
        return score

    @property
    def metrics(self) -> dict[str, float]:
        """The parts under the names that they have among a run's metrics: `reward/NAME`."""
        return {f"{PART_PREFIX}{name}": value for name, value in self.parts.items()}
