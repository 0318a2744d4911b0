"""Staleness: how many groups may be admitted, and which finished ones make the next batch.

With B = groups a training step, i = policy version, eta = `max_staleness`, N = groups ever
admitted and not rejected, a group's *deadline* is its admission version plus eta.

Admission (AReaL, arXiv:2505.24298, eq. 3) goes on while N < (i + eta + 1) B. That limits the rate,
not the staleness of what is trained: young fast groups overtake old slow ones. What happens over
the bound is `OverBound`:

    train        nothing: the B oldest finished groups are trained
    mask         as train; tokens of versions below i - eta are left out of the loss
    wait         the batch is held back until no group is left that would have to pass its deadline
    regenerate   groups past their deadline are rejected, and their prompts admitted anew

Why `wait` always finds a batch: let n_k be the unconsumed groups with deadline <= i + k. When
n_k <= (k+1) B for k = 0..eta, the B groups of earliest deadline hold at least n_k - k B of every
n_k, so when all are finished a batch exists; and after a batch that holds them, n_k - (n_k - k B)
= k B groups at most have the deadline (i+1) + (k-1): the same bound, one version on. Admissions at
version i touch n_eta alone, which is N - i B < (eta + 1) B before each, by eq. 3. A rejection takes
one group from N and from some n_k at once, and its refund is admitted at the current version; a
requeued group keeps its deadline and its place. Both leave the bound standing.

All functions here are pure; what is decided is done by the caller, in the ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from areal_sc.config.schema import OverBound
from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.metadata import RowMetadata


def by_deadline(group: Group) -> tuple[int, int]:
    """Sort key: the earliest deadline first, and of one version in the order of admission."""
    return group.admitted_version, group.group_id


@dataclass(frozen=True, slots=True)
class BatchDecision:
    """What to do for the batch of one version.

    Attributes:
        groups: the `train_batch_groups` finished groups to train, oldest first; None: not yet.
        stale: groups to reject as "stale" first; none of them is in `groups`.
        num_missing: when `groups` is None, how many groups must finish first, at least.
    """

    groups: list[Group] | None
    stale: list[Group]
    num_missing: int


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    """Admission and batch forming.

    Each policy version is expected to train exactly one batch of `train_batch_groups` groups, from
    version 0 on; eq. 3 counts on it.

    Attributes: as the settings of these names.
    Raises: ConfigError: a number is out of its range.
    """

    max_staleness: int
    train_batch_groups: int
    over_bound: OverBound

    def num_admissible(self, version: int, num_admitted_not_rejected: int) -> int:
        """How many groups may be admitted now, by eq. 3: floor(N / B) <= i + eta before each."""
        limit = (version + self.max_staleness + 1) * self.train_batch_groups
        return max(0, limit - num_admitted_not_rejected)

    def deadline(self, group: Group) -> int:
        """The last version that may train the group without passing the bound."""
        return group.admitted_version + self.max_staleness

    def min_token_version(self, version: int) -> int | None:
        """Tokens of versions below it add nothing to the loss; None: every token is trained."""
        if self.over_bound == OverBound.mask:
            return version - self.max_staleness
        return None

    def expired(self, groups: Iterable[Group], version: int) -> list[Group]:
        """Groups to reject as stale at `version`, whatever their state.

        `regenerate`: those past their deadline. `wait`: the same, but there are none unless a run
        was resumed with a tighter bound. Else none.
        """
        if self.over_bound not in (OverBound.regenerate, OverBound.wait):
            return []
        return [group for group in groups if self.deadline(group) < version]

    def form_batch(self, groups: Iterable[Group], version: int) -> BatchDecision:
        """The batch of `version`, out of all unconsumed groups of the ledger."""
        candidates = sorted(groups, key=by_deadline)
        stale = self._stale(candidates, version)
        stale_ids = {group.group_id for group in stale}
        candidates = [group for group in candidates if group.group_id not in stale_ids]
        batch = [group for group in candidates if group.state is GroupState.finished]
        batch = batch[: self.train_batch_groups]

        num_missing = self.train_batch_groups - len(batch)
        if num_missing == 0 and self.over_bound == OverBound.wait:
            num_missing = self._overdue_shortfall(candidates, batch, version)
        return BatchDecision(None if num_missing else batch, stale, num_missing)

    def too_early(self, groups: Iterable[Group], full: Container[str], version: int) -> list[Group]:
        """Finished groups in whose room older ones have to run before there is a batch.

        Admission reserves room for all of its groups. But later there may be less: with smaller
        stores, fewer workers or larger groups after a resume, or a fuller memory after a restart.
        Stores that hold a batch hold one of the oldest groups, so what is given back here ends.
        There are none while a group runs: its end may be enough for a batch.

        Args:
            groups: the unconsumed ones.
            full: workers that have room for no further group.
        """
        ordered = sorted(groups, key=by_deadline)
        states = Counter(group.state for group in ordered)
        if states[GroupState.running] or states[GroupState.finished] < self.train_batch_groups:
            return []
        if self.form_batch(ordered, version).groups is not None:
            return []
        queued = [group for group in ordered if group.state is GroupState.queued]
        finished = [group for group in ordered if group.batch is not None and group.worker in full]
        pairs = zip(queued, reversed(finished), strict=False)
        return [late for due, late in pairs if due.admitted_version < late.admitted_version]

    def _stale(self, groups: Sequence[Group], version: int) -> list[Group]:
        if self.over_bound != OverBound.mask:
            return self.expired(groups, version)
        oldest_trained = version - self.max_staleness
        return [
            group
            for group in groups
            if group.batch is not None
            and not any(row.num_loss_tokens_since(oldest_trained) for row in group.batch.rows)
        ]

    def _overdue_shortfall(
        self, groups: Sequence[Group], batch: Sequence[Group], version: int
    ) -> int:
        """How many groups `batch` lacks at the first deadline that it leaves too many groups for.

        `batch` holds the finished groups of earliest deadline, so it holds as many of every n_k
        as any batch can: where it falls short, only waiting helps.
        """
        size = self.train_batch_groups
        num_due = self._num_due(groups, version)
        num_in_batch = self._num_due(batch, version)
        for k, (due, taken) in enumerate(zip(num_due, num_in_batch, strict=True)):
            required = min(size, due - k * size)
            if taken < required:
                return required - taken
        return 0

    def _num_due(self, groups: Sequence[Group], version: int) -> list[int]:
        """n_k for k = 0..eta: how many of the groups have a deadline <= version + k."""
        counts = [0] * (self.max_staleness + 1)
        for group in groups:
            assert group.admitted_version <= version, (
                f"group {group.group_id} was admitted at version {group.admitted_version}, "
                f"after the current version {version}"
            )
            counts[self.deadline(group) - version] += 1
        return list(accumulate(counts))


@dataclass(frozen=True, slots=True)
class StalenessStats:
    """How stale one batch is, in policy versions.

    Attributes:
        token_mean, token_max: over the trained tokens: version - the version that sampled it.
        group_mean, group_max: over groups: version - the admission version.
        num_tokens_trained: tokens in the loss.
        num_tokens_masked: tokens that the bound left out of the loss.
    """

    token_mean: float
    token_max: int
    group_mean: float
    group_max: int
    num_tokens_trained: int
    num_tokens_masked: int

    @classmethod
    def of(
        cls, rows: Sequence[RowMetadata], version: int, min_token_version: int | None = None
    ) -> StalenessStats:
        """The statistics of the rows of a batch trained at `version`; all 0 without tokens.

        Args:
            min_token_version: see `StalenessPolicy.min_token_version`.
        """
        spans = [span for row in rows for span in row.version_spans if span[1] > 0]
        trained = [
            (version - sampled_by, count)
            for sampled_by, count in spans
            if min_token_version is None or sampled_by >= min_token_version
        ]
        num_tokens = sum(count for _, count in spans)
        num_trained = sum(count for _, count in trained)
        groups = [version - v for v in {r.group_id: r.admitted_version for r in rows}.values()]
        return cls(
            token_mean=sum(age * count for age, count in trained) / max(1, num_trained),
            token_max=max((age for age, _ in trained), default=0),
            group_mean=sum(groups) / max(1, len(groups)),
            group_max=max(groups, default=0),
            num_tokens_trained=num_trained,
            num_tokens_masked=num_tokens - num_trained,
        )
