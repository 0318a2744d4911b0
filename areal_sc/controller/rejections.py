"""What a run throws away, by cause, and when that is too much of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping

from msgspec import Struct

from areal_sc.controller.group import Group, GroupState
from areal_sc.errors import TooManyRejections


class RejectionCounts(Struct, frozen=True):
    """What a resumed run goes on counting from; see `Rejections`."""

    episodes: dict[str, int]
    num_stale_episodes: int


class Rejections:
    """Episodes that were never trained; counts since the start of the run.

    Args:
        window: the share of rejected episodes is that of the last so many groups.
        max_rate: share of rejected episodes above which the run ends; stale ones do not count.

    Attributes:
        episodes: those rejected by their workflow or reward, by cause.
        examples: cause -> one full message.
        num_stale_episodes: those of groups that were rejected as stale.
        wasted_tokens: that they would have trained.
    """

    def __init__(self, window: int, max_rate: float) -> None:
        self.episodes: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.num_stale_episodes = 0
        self.wasted_tokens = 0
        self._max_rate = max_rate
        self._window = window
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)

    @property
    def num_episodes(self) -> int:
        """All of them, stale ones included."""
        return self.episodes.total() + self.num_stale_episodes

    def add_group(self, rejected: Mapping[str, tuple[int, str]], num_episodes: int) -> None:
        """Counts one group that ran to its end.

        Args:
            rejected: cause -> (number of episodes, one full message).
            num_episodes: episodes of the group, the rejected ones included.
        """
        num_rejected = 0
        for cause, (count, example) in rejected.items():
            self.episodes[cause] += count
            self.examples.setdefault(cause, example)
            num_rejected += count
        self._recent.append((num_rejected, num_episodes))

    def add_stale(self, group: Group, num_episodes: int) -> None:
        """Counts a group, of so many episodes, that became stale."""
        if group.state is GroupState.running:
            self.num_stale_episodes += num_episodes
        if group.batch is not None:
            self.num_stale_episodes += len(group.batch.episodes)
            self.wasted_tokens += sum(row.num_loss_tokens for row in group.batch.rows)

    def check_rate(self) -> None:
        """Raises: TooManyRejections: more than `max_rate` of the window's were rejected."""
        if len(self._recent) < self._window:
            return
        rejected = sum(count for count, _ in self._recent)
        episodes = sum(count for _, count in self._recent)
        if rejected > self._max_rate * episodes:
            raise TooManyRejections(
                f"{rejected} of the last {episodes} episodes were rejected; "
                f"rollout.max_rejection_rate is {self._max_rate:g}. Causes: "
                f"{self.describe_causes()}. For example: "
                f"{next(iter(self.examples.values()), 'none')}"
            )

    def describe_causes(self) -> str:
        """Every cause with its number of episodes, the most frequent one first."""
        causes = self.episodes.most_common()
        return ", ".join(f"{cause} x{count}" for cause, count in causes) or "none"

    def snapshot(self) -> RejectionCounts:
        return RejectionCounts(dict(self.episodes), self.num_stale_episodes)

    def restore(self, counts: RejectionCounts) -> None:
        self.episodes = Counter(counts.episodes)
        self.num_stale_episodes = counts.num_stale_episodes
