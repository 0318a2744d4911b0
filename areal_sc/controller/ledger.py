"""The ledger: the truth about every group ever admitted.

    admit        start          finish           consume(step)
    -----> queued -----> running -----> finished ------------> consumed
              ^------------'---------------'  requeue_all: the workers are gone
              '------------'---------------'-----------------> rejected   reject(reason)

A group is the completions of one prompt; its id is given once, in order of admission, and never
again. An infrastructure failure is no result: a new *attempt* of the same group starts, under the
same admission version, and what an earlier attempt still sends is ignored.

Pure state: nothing here waits, reads a clock or touches a file. Consumed and rejected groups leave
nothing but counts, so the ledger is as large as the groups in flight, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from areal_sc.controller.group import Group, GroupState
from areal_sc.errors import LedgerError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata


class LedgerState(Struct, array_like=True):
    """The whole ledger, as a snapshot keeps it.

    Attributes:
        unconsumed: copies of the groups; in a ledger itself they lie elsewhere.
        rejected: number of groups by reason.
        untrained_step: the newest step that consumed groups.
        untrained: of those groups the ones that were not trained yet.
    """

    next_id: int = 0
    unconsumed: tuple[Group, ...] = ()
    num_consumed: int = 0
    rejected: dict[str, int] = {}
    rows_consumed: int = 0
    rows_trained: int = 0
    rows_trained_twice: int = 0
    untrained_step: int = 0
    untrained: set[int] = set()


class Ledger:
    """Every group's state, and the counts that admission and the run's account need."""

    def __init__(self) -> None:
        self._state = LedgerState()
        self._unconsumed: dict[int, Group] = {}  # insertion order is id order
        self._num_in: Counter[GroupState] = Counter()  # of the unconsumed ones

    @property
    def num_admitted_not_rejected(self) -> int:
        """N of AReaL's eq. 3 (arXiv:2505.24298): rejected groups are refunded."""
        return self._state.next_id - sum(self._state.rejected.values())

    def num(self, state: GroupState) -> int:
        """Number of groups that are queued, running or finished; O(1)."""
        return self._num_in[state]

    def unconsumed(self) -> Iterator[Group]:
        """Queued, running and finished groups, by ascending group id."""
        return iter(self._unconsumed.values())

    def is_finished(self, group_id: int, attempt: int) -> bool:
        """Whether the group is finished, with the rows of this attempt."""
        group = self._unconsumed.get(group_id)
        return group is not None and (group.state, group.attempt) == (GroupState.finished, attempt)

    def admit(self, prompt: PromptReference, version: int) -> Group:
        """A new group, queued, admitted under policy `version`."""
        group = Group(self._state.next_id, prompt, version)
        self._state.next_id += 1
        self._insert(group)
        return group

    def start(self, group_id: int, worker: str) -> int:
        """queued -> running on `worker`; returns the attempt that its result must name."""
        group = self._expect(group_id, "start", GroupState.running, GroupState.queued)
        self._move(group, GroupState.running)
        group.worker = worker
        return group.attempt

    def finish(self, group_id: int, attempt: int, batch: BatchMetadata) -> bool:
        """running -> finished with the rows of `batch`.

        Returns: False, and nothing changes, for the late result of an attempt that is not current
            or of a group that no longer runs.
        Raises: LedgerError: the group was never admitted, the batch is empty, or it holds rows of
            another group, attempt or admission version.
        """
        if group_id >= self._state.next_id:
            raise LedgerError(f"finish: group {group_id} is {self._state_of(group_id)}")
        group = self._unconsumed.get(group_id)
        if group is None or group.state is not GroupState.running or group.attempt != attempt:
            return False
        expected = (group_id, attempt, group.admitted_version)
        found = {(row.group_id, row.attempt, row.admitted_version) for row in batch.rows}
        if found != {expected}:
            raise LedgerError(
                f"finish: batch {batch.batch_id} of group {group_id}: expected rows of (group, "
                f"attempt, admitted version) {expected}, got {sorted(found) or 'no rows'}"
            )
        self._move(group, GroupState.finished)
        group.batch = batch
        return True

    def requeue_all(self) -> None:
        """Every unconsumed group -> queued with a new attempt: no worker of before is left.

        Ids and admission versions stay, and so do deadlines, and "trained once".
        """
        for group in self.unconsumed():
            self._move(group, GroupState.queued)
            group.attempt += 1
            group.worker = None
            group.batch = None

    def requeue(self, group_id: int, cause: str) -> int:
        """running | finished -> queued: its worker, or its rows, are gone; returns the new attempt.

        Id and admission version stay, and so do its deadline, and "trained once".

        Args:
            cause: why, for whoever reads the account.
        """
        group = self._expect(
            group_id, "requeue", GroupState.queued, GroupState.running, GroupState.finished
        )
        self._move(group, GroupState.queued)
        group.attempt += 1
        group.worker, group.batch = None, None
        return group.attempt

    def reject(self, group_id: int, reason: str) -> None:
        """queued | running | finished -> rejected, and refunded.

        Args:
            reason: a category that is counted (`stale`, `reward_error`, ...), not a message: each
                distinct one is kept for the whole run.
        """
        group = self._expect(group_id, "reject", GroupState.rejected, *_UNCONSUMED)
        self._remove(group, GroupState.rejected)
        self._state.rejected[reason] = self._state.rejected.get(reason, 0) + 1

    def consume(self, group_ids: Sequence[int], step: int) -> list[BatchMetadata]:
        """finished -> consumed by training step `step`; all of them, or none when one cannot be.

        Groups that an earlier step consumed are trained by now, or never.

        Returns: the groups' batches, in the order of `group_ids`; the ledger lets go of them.
        Raises: LedgerError: a group is not finished, is named twice, or was consumed before.
        """
        verb = f"consume at step {step}"
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"{verb}: a group is named twice in {group_ids}")
        groups = [
            self._expect(group_id, verb, GroupState.consumed, GroupState.finished)
            for group_id in group_ids
        ]
        batches = []
        for group in groups:
            assert group.batch is not None
            batches.append(group.batch)
            self._remove(group, GroupState.consumed)
        state = self._state
        if step != state.untrained_step:
            state.untrained, state.untrained_step = set(), step
        state.untrained.update(group_ids)
        state.num_consumed += len(groups)
        state.rows_consumed += sum(batch.total_batch_size for batch in batches)
        return batches

    def record_trained(self, rows: Iterable[RowMetadata]) -> None:
        """Counts the rows that one training step was really given, once it is done.

        A row of a group that is not waiting to be trained, because an earlier call named it or a
        later step has begun, counts as trained twice.

        Raises: LedgerError: a row's group was not consumed.
        """
        num_rows = Counter(row.group_id for row in rows)
        for group_id in num_rows:
            if group_id >= self._state.next_id or group_id in self._unconsumed:
                raise LedgerError(
                    f"trained on group {group_id}: expected consumed, "
                    f"it is {self._state_of(group_id)}"
                )
        for group_id, count in num_rows.items():
            self._state.rows_trained += count
            if group_id not in self._state.untrained:
                self._state.rows_trained_twice += count
        self._state.untrained.difference_update(num_rows)

    def account(self) -> dict[str, Any]:
        """Where every group ever admitted is, and what was trained.

        admitted == queued + running + finished + consumed + sum(rejected.values()), always.
        """
        state = self._state
        account = {
            "admitted": state.next_id,
            **{name.value: self.num(name) for name in _UNCONSUMED},
            "consumed": state.num_consumed,
            "rejected": dict(state.rejected),
            "rows_consumed": state.rows_consumed,
            "rows_trained": state.rows_trained,
            "rows_trained_twice": state.rows_trained_twice,
        }
        num_unrejected = len(self._unconsumed) + state.num_consumed
        assert self.num_admitted_not_rejected == num_unrejected, f"groups were lost: {account}"
        return account

    def snapshot(self) -> LedgerState:
        """The whole ledger; `restore` is its inverse."""
        return _copy(self._state, tuple(copy(group) for group in self.unconsumed()))

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """The ledger that `state` was taken of, exactly.

        Where the workers of then are gone, `requeue_all` follows.
        """
        ledger = cls()
        ledger._state = _copy(state, ())
        for group in state.unconsumed:
            ledger._insert(copy(group))
        return ledger

    def _insert(self, group: Group) -> None:
        self._unconsumed[group.group_id] = group
        self._num_in[group.state] += 1

    def _move(self, group: Group, state: GroupState) -> None:
        self._num_in[group.state] -= 1
        group.state = state
        self._num_in[state] += 1

    def _remove(self, group: Group, state: GroupState) -> None:
        del self._unconsumed[group.group_id]
        self._num_in[group.state] -= 1
        group.state = state
        group.batch = None

    def _expect(self, group_id: int, verb: str, target: GroupState, *sources: GroupState) -> Group:
        group = self._unconsumed.get(group_id)
        if group is None or group.state not in sources:
            raise LedgerError(
                f"{verb}: group {group_id} cannot become {target}: expected "
                f"{' or '.join(sources)}, it is {self._state_of(group_id)}"
            )
        return group

    def _state_of(self, group_id: int) -> str:
        if group_id >= self._state.next_id:
            return f"unknown ({self._state.next_id} groups were admitted)"
        if group_id not in self._unconsumed:
            return "consumed or rejected already"
        return self._unconsumed[group_id].state


_UNCONSUMED = (GroupState.queued, GroupState.running, GroupState.finished)


def _copy(state: LedgerState, unconsumed: tuple[Group, ...]) -> LedgerState:
    rejected, untrained = dict(state.rejected), set(state.untrained)
    return replace(state, unconsumed=unconsumed, rejected=rejected, untrained=untrained)
