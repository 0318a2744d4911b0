"""What a run throws away, by cause, and when that is too much of it.

    finished ──► has signal ──► stays, to be trained
                 has none ────► rejected by name, refunded; the next prompt is drawn

Groups without signal are those whose rewards, before shaping, are all equal: they teach nothing. A
group is judged when it ends, whatever its length, and keeps its place in the order of admission
until then; so slow prompts stay as likely to be trained as fast ones. Pure state.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from msgspec import Struct

from areal_sc.config.schema import KeepGroups, RolloutConfig
from areal_sc.controller.ledger.group import UNUSABLE, Group, GroupState
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.errors import TooManyRejections, WorkflowError
from areal_sc.metadata import BatchMetadata
from areal_sc.rejection import Rejection, RejectionKind, describe_counts
from areal_sc.workers.calls import RejectedEpisodes

logger = logging.getLogger(__name__)

STALE = "stale"
"""Stands for the cause of groups that got too old."""

_BEFORE_GENERATION: Final = (
    RejectionKind.prompt_error,
    RejectionKind.dataset_error,
    RejectionKind.agent_no_call,
)


EQUAL_REWARDS: Final = "equal_rewards"
ONE_EPISODE: Final = "one_episode"
"""Rejections have left a single episode, which has nothing to be compared with."""

MAX_BATCHES: Final = 10
"""Batches of groups in a row without signal, after which nothing is to be expected of more."""


def main_cause(rejected: Sequence[RejectedEpisodes]) -> str:
    """Why most episodes of a group were rejected; "empty" where none was, and none gave rows."""
    if not rejected:
        return "empty"
    return max(rejected, key=lambda same: same.num_episodes).first.cause


def lack_of_signal(batch: BatchMetadata) -> str | None:
    """Why the rows of one group teach nothing; None where its episodes differ in rewards."""
    if len(batch.episodes) == 1:
        return ONE_EPISODE
    return None if batch.groups_with_signal else EQUAL_REWARDS


class RejectionCounts(Struct, frozen=True):
    """What a resumed run goes on counting from; see `Rejections`."""

    episodes: dict[str, int]
    num_stale_episodes: int


class Rejections:
    """Episodes that were never trained; counts since the start of the run.

    Attributes:
        warn: is told at once of the first rejection of each cause, and when nothing finishes;
            in the log, unless somebody else listens.
        episodes: those rejected by their workflow or reward, by cause.
        firsts: the first rejection of each cause, since the start of this process.
        num_stale_episodes: those of groups that were rejected as stale.
        wasted_tokens: that they would have trained.
        left_out: rows of prompts that leave no room for an answer; they are no rejections.
    """

    def __init__(self, config: RolloutConfig) -> None:
        self.warn: Callable[[str], None] = partial(logger.warning, "%s")
        self.episodes: Counter[str] = Counter()
        self.firsts: dict[str, Rejection] = {}
        self.num_stale_episodes = 0
        self.wasted_tokens = 0
        self._max_rate = config.max_rejection_rate
        self._window = config.rejection_window
        self._recent: deque[tuple[int, int]] = deque(maxlen=self._window)
        self._keeps_all = config.keep_groups is KeepGroups.all
        self._most_without_signal = max(MAX_BATCHES * config.train_batch_groups, self._window)
        self._num_without_signal = 0  # groups in a row
        self.left_out: set[int] = set()
        self._has_asked = False  # a model, with any prompt

    @property
    def num_episodes(self) -> int:
        """All of them, stale ones included."""
        return self.episodes.total() + self.num_stale_episodes

    def by_cause(self) -> dict[str, int]:
        """Number of episodes by cause, stale ones included; nothing is 0."""
        stale = {STALE: self.num_stale_episodes} if self.num_stale_episodes else {}
        return {**self.episodes, **stale}

    def note_rejection(self, rejection: Rejection) -> None:
        """Tells of a rejection if it is the first of its cause; it is counted with its group."""
        if rejection.cause not in self.firsts:
            self.firsts[rejection.cause] = rejection
            self.warn(f"an episode was rejected, the first for this cause: {rejection.describe()}")

    def add_group(self, rejected: Sequence[RejectedEpisodes], num_episodes: int) -> None:
        """Counts one group that ran to its end.

        Args:
            num_episodes: episodes of the group, the rejected ones included.
        """
        kinds = {same.first.kind for same in rejected}
        if kinds == {RejectionKind.prompt_too_long}:
            self._leave_out(rejected[0].first)
            return
        num_rejected = 0
        for same in rejected:
            self.note_rejection(same.first)
            self.episodes[same.first.cause] += same.num_episodes
            num_rejected += same.num_episodes
        self._recent.append((num_rejected, num_episodes))
        self._has_asked |= num_rejected < num_episodes or not kinds <= {*_BEFORE_GENERATION}

    def _leave_out(self, why: Rejection) -> None:
        """Tells of the first one; how many there were is told at the end."""
        if not self.left_out:
            self.warn(f"a prompt is left out, row {why.prompt_index} of the dataset: {why.message}")
        self.left_out.add(why.prompt_index)

    def add_stale(self, group: Group, num_episodes: int) -> None:
        """Counts a group, of so many episodes, that became stale."""
        if group.state is GroupState.running:
            self.num_stale_episodes += num_episodes
        if group.batch is not None:
            self.num_stale_episodes += len(group.batch.episodes)
            self.wasted_tokens += sum(row.num_loss_tokens for row in group.batch.rows)

    def refuse_without_signal(self, batch: BatchMetadata) -> str | None:
        """Why the group with these rows is not trained, by `rollout.keep_groups`; None: it is.

        Its kept episodes are counted; they say nothing of failures.
        """
        reason = None if self._keeps_all else lack_of_signal(batch)
        self._num_without_signal = self._num_without_signal + 1 if reason else 0
        if reason:
            self.episodes[reason] += len(batch.episodes)
            self.wasted_tokens += sum(row.num_loss_tokens for row in batch.rows)
        return reason

    def check_rate(self, num_prompts: int | None = None) -> None:
        """Args: num_prompts: of the dataset; None: that is not known.

        Raises: TooManyRejections: more than `rollout.max_rejection_rate` of the window's were
            rejected, which stale ones are not; or nothing has signal; or the model was asked
            nothing so far. WorkflowError: all prompts are too long.
        """
        if self._num_without_signal >= self._most_without_signal:
            raise TooManyRejections(
                f"nothing has signal: in each of the last {self._num_without_signal} groups all "
                "rewards are equal, and rollout.keep_groups=with_signal trains none of them. If no "
                "answer is right, give partial credit or easier prompts; if all are, harder ones"
            )
        if not self._has_asked:
            self._check_begin(min(num_prompts or self._window, self._window))
        if len(self._recent) < self._window:
            return
        rejected = sum(count for count, _ in self._recent)
        episodes = sum(count for _, count in self._recent)
        if rejected > self._max_rate * episodes:
            raise TooManyRejections(
                f"{rejected} of the last {episodes} episodes were rejected; "
                f"rollout.max_rejection_rate is {self._max_rate:g}. Causes: "
                f"{describe_counts(self.episodes)}. For example: {self.describe_example()}"
            )

    def _check_begin(self, most_left_out: int) -> None:
        if len(self.left_out) >= most_left_out:
            raise WorkflowError(
                f"all {len(self.left_out)} prompts so far leave no room for an answer: raise "
                "rollout.max_context_tokens as far as the model and "
                "actor.max_tokens_per_micro_batch allow, or give shorter prompts"
            )
        if len(self._recent) >= UNUSABLE:
            raise TooManyRejections(
                f"none of the first {len(self._recent)} prompts came to the model. "
                f"Causes: {describe_counts(self.episodes)}. For example: {self.describe_example()}"
            )

    def describe_example(self) -> str:
        """One rejection, of the most frequent cause that is known."""
        known = max(self.firsts, key=lambda cause: self.episodes[cause], default=None)
        return "none" if known is None else self.firsts[known].describe()

    def snapshot(self) -> RejectionCounts:
        return RejectionCounts(dict(self.episodes), self.num_stale_episodes)

    def restore(self, counts: RejectionCounts) -> None:
        self.episodes = Counter(counts.episodes)
        self.num_stale_episodes = counts.num_stale_episodes


class RolloutState(Struct, frozen=True):
    """What a controller needs to go on; see `RolloutController.go_back`."""

    training: LedgerState
    rejections: RejectionCounts


INITIAL_STATE: Final = RolloutState(LedgerState(), RejectionCounts({}, 0))
"""The state of a run that has done nothing yet."""
