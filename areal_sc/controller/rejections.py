"""What a run throws away, by cause, and when that is too much of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

from msgspec import Struct

from areal_sc.errors import TooManyRejections
from areal_sc.metadata import RowMetadata


class RejectionCounts(Struct, frozen=True):
    """What a resumed run goes on counting from; see `Rejections`."""

    rows: dict[str, int]
    num_stale_rows: int


class Rejections:
    """Rows that were never trained; counts since the start of the run.

    Args:
        window: the share of rejected rows is that of the last so many groups.
        max_rate: share of rejected rows above which the run ends; stale rows do not count.

    Attributes:
        rows: those rejected by their workflow or reward, by cause.
        examples: cause -> one full message.
        num_stale_rows: rows of groups that were rejected as stale, finished or running.
        wasted_tokens: trained-to-be tokens of finished groups among them.
    """

    def __init__(self, window: int, max_rate: float) -> None:
        self.rows: Counter[str] = Counter()
        self.examples: dict[str, str] = {}
        self.num_stale_rows = 0
        self.wasted_tokens = 0
        self._max_rate = max_rate
        self._window = window
        self._recent: deque[tuple[int, int]] = deque(maxlen=window)

    def add_group(self, rejected: Mapping[str, tuple[int, str]], num_rows: int) -> None:
        """Counts one group that ran to its end.

        Args:
            rejected: cause -> (number of rows, one full message).
            num_rows: rows of the group, the rejected ones included.
        """
        num_rejected = 0
        for cause, (count, example) in rejected.items():
            self.rows[cause] += count
            self.examples.setdefault(cause, example)
            num_rejected += count
        self._recent.append((num_rejected, num_rows))

    def add_stale_running(self, num_rows: int) -> None:
        """Counts a group that became stale while it was generated."""
        self.num_stale_rows += num_rows

    def add_stale_finished(self, rows: Sequence[RowMetadata]) -> None:
        """Counts a group that became stale after it was generated."""
        self.num_stale_rows += len(rows)
        self.wasted_tokens += sum(row.num_loss_tokens for row in rows)

    def check_rate(self) -> None:
        """Raises: TooManyRejections: more than `max_rate` of the window's rows were rejected."""
        if len(self._recent) < self._window:
            return
        rejected = sum(count for count, _ in self._recent)
        rows = sum(count for _, count in self._recent)
        if rejected > self._max_rate * rows:
            raise TooManyRejections(
                f"{rejected} of the last {rows} rows were rejected; rollout.max_rejection_rate "
                f"is {self._max_rate:g}. Causes: {self.describe_causes()}. For example: "
                f"{next(iter(self.examples.values()), 'none')}"
            )

    def describe_causes(self) -> str:
        """Every cause with its number of rows, the most frequent one first."""
        causes = self.rows.most_common()
        return ", ".join(f"{cause} x{count}" for cause, count in causes) or "none"

    def snapshot(self) -> RejectionCounts:
        """What a resumed run goes on counting from; see `restore`."""
        return RejectionCounts(dict(self.rows), self.num_stale_rows)

    def restore(self, counts: RejectionCounts) -> None:
        """Goes on from `counts`."""
        self.rows = Counter(counts.rows)
        self.num_stale_rows = counts.num_stale_rows
