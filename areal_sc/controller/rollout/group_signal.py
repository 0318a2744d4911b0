"""Groups without signal: before shaping their rewards are all equal, so they teach nothing.

    finished ──► has signal ──► stays, to be trained
                 has none ────► rejected by name, refunded; the next prompt is drawn

A group is judged when it ends, whatever its length, and keeps its place in the order of admission
until then; so slow prompts stay as likely to be trained as fast ones. Pure state.
"""

from __future__ import annotations

from typing import Final

from areal_sc.config.schema import KeepGroups, RolloutConfig
from areal_sc.errors import TooManyRejections
from areal_sc.metadata import BatchMetadata

EQUAL_REWARDS: Final = "equal_rewards"
ONE_EPISODE: Final = "one_episode"
"""Rejections have left a single episode, which has nothing to be compared with."""

MAX_BATCHES: Final = 10
"""Batches of groups in a row without signal, after which nothing is to be expected of more."""


class GroupSignal:
    """Says which finished groups `rollout.keep_groups` lets go of."""

    def __init__(self, config: RolloutConfig) -> None:
        self._keeps_all = config.keep_groups is KeepGroups.all
        self._most_in_a_row = max(MAX_BATCHES * config.train_batch_groups, config.rejection_window)
        self._num_in_a_row = 0

    def refusal(self, batch: BatchMetadata) -> str | None:
        """Why the group with these rows is not trained; None: it is."""
        if self._keeps_all:
            return None
        reason = lack_of_signal(batch)
        self._num_in_a_row = self._num_in_a_row + 1 if reason else 0
        return reason

    def check(self) -> None:
        """Raises: TooManyRejections: so many groups in a row had no signal."""
        if self._num_in_a_row >= self._most_in_a_row:
            raise TooManyRejections(
                f"nothing has signal: in each of the last {self._num_in_a_row} groups all rewards "
                "are equal, and rollout.keep_groups=with_signal trains none of them. If no answer "
                "is right, give partial credit or easier prompts; if all are, harder ones"
            )


def lack_of_signal(batch: BatchMetadata) -> str | None:
    """Why the rows of one group teach nothing; None where its episodes differ in rewards."""
    if len(batch.episodes) == 1:
        return ONE_EPISODE
    return None if batch.groups_with_signal else EQUAL_REWARDS
