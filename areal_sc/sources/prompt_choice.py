"""Choosing prompts by what they have given before: with which share of their turns they are taken.

    a row's turn ──► never taken yet ────────────────────► taken
                     taken before ──► share(past) ──┬────► taken, with this probability
                                                    └────► passed over, until the next epoch

The order of a dataset stays, so that no row is taken twice in an epoch. No torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from areal_sc.errors import WorkflowError
from areal_sc.user_code import user_code, user_function

ALL: Final = "all"
WITH_SIGNAL: Final = "with_signal"

SHARE_WITHOUT_SIGNAL: Final = 0.25
"""A policy that learns, or a group that was unlucky, gives another prompt signal later; so each is
looked at again, after four epochs on average."""


class PromptPast(Struct, frozen=True, array_like=True):
    """What the groups of a prompt have given.

    Attributes:
        num_groups: finished ones, 1 or more.
        success: of the newest one: its mean accuracy; its mean reward if there is no accuracy,
            without what shapes it.
        has_signal: whether its episodes differ in their rewards, without what shapes them.
    """

    num_groups: int
    success: float
    has_signal: bool


ShareFunction = Callable[[PromptPast], float]
"""The share of its turns with which a prompt is taken again, from 0 to 1."""


def with_signal(past: PromptPast) -> float:
    """Every turn of a prompt that had signal; of others SHARE_WITHOUT_SIGNAL."""
    return 1.0 if past.has_signal else SHARE_WITHOUT_SIGNAL


class PromptChoice:
    """Says which rows are taken, by `rollout.choose_prompts`.

    Args:
        name: `all`, `with_signal`, or `package.module:function`, a `ShareFunction`.
        seed: of the draws; a row's turn is drawn alike whenever the run goes on.

    Attributes:
        takes_all: nothing is chosen.
    Raises: ConfigError: there is no such function.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.takes_all = name == ALL
        self._name = name
        self._seed = seed
        self._share = with_signal if name in (ALL, WITH_SIGNAL) else _own_function(name)

    def takes(self, position: int, past: PromptPast | None) -> bool:
        """Whether the prompt at this position of the dataset is taken.

        Args: past: None: it was not taken yet.
        Raises: WorkflowError: the function raised, or gave no share.
        """
        if past is None:
            return True
        with user_code(f"rollout.choose_prompts {self._name!r}"):
            share = float(self._share(past))
        if not 0 <= share <= 1:
            raise WorkflowError(
                f"rollout.choose_prompts {self._name!r}: expected a share from 0 to 1 of {past}, "
                f"got {share}"
            )
        return random.Random(f"{self._seed}/{position}").random() < share


def _own_function(name: str) -> ShareFunction:
    expected = f"{ALL}, {WITH_SIGNAL} or package.module:function, which takes a PromptPast"
    return user_function(name, "past", {}, what="rollout.choose_prompts", expected=expected)
