"""The ledger: the truth about every group ever admitted.

    admit        start          finish           consume(step)
    -----> queued -----> running -----> finished ------------> consumed
              ^------------'---------------'  requeue: its worker or its rows are lost
              '------------'---------------'-----------------> rejected   reject(reason)

A group is the completions of one prompt; its id is given once, in order of admission, and never
again. An infrastructure failure is no result: `requeue` starts a new *attempt* of the same group
under the same admission version, and what an earlier attempt still sends is ignored.

Pure state: nothing here waits, reads a clock or touches a file. Consumed and rejected groups leave
nothing but counts, so that the ledger's size is that of the groups in flight, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from typing import Any

from msgspec import Struct

from areal_sc.controller.group import Group, GroupState
from areal_sc.errors import LedgerError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata


class LedgerState(Struct, frozen=True, array_like=True):
    """The whole ledger, as a snapshot keeps it.

    Attributes:
        unconsumed: copies of the groups.
        untrained_step: the newest step that consumed groups.
        untrained: of those groups the ones that were not trained yet, ascending.
    """

    next_id: int
    unconsumed: tuple[Group, ...]
    num_consumed: int
    rejected: dict[str, int]
    rows_consumed: int
    rows_trained: int
    rows_trained_twice: int
    untrained_step: int
    untrained: tuple[int, ...]


class Ledger:
    """Every group's state, and the counts that admission and the run's account need."""

    def __init__(self) -> None:
        self._next_id = 0
        self._unconsumed: dict[int, Group] = {}  # insertion order is id order
        self._by_state: dict[GroupState, dict[int, Group]] = {
            state: {} for state in (GroupState.queued, GroupState.running, GroupState.finished)
        }
        self._num_consumed = 0
        self._rejected: Counter[str] = Counter()
        self._rows_consumed = 0
        self._rows_trained = 0
        self._rows_trained_twice = 0
        self._untrained: set[int] = set()  # of the groups that the newest step consumed
        self._untrained_step = 0

    @property
    def num_admitted_not_rejected(self) -> int:
        """N of AReaL's eq. 3 (arXiv:2505.24298): rejected groups are refunded."""
        return self._next_id - self._rejected.total()

    def num(self, state: GroupState) -> int:
        """Number of groups in a state; O(1)."""
        if state is GroupState.consumed:
            return self._num_consumed
        if state is GroupState.rejected:
            return self._rejected.total()
        return len(self._by_state[state])

    def unconsumed(self) -> Iterator[Group]:
        """Queued, running and finished groups, by ascending group id."""
        return iter(self._unconsumed.values())

    def in_state(self, state: GroupState) -> list[Group]:
        """The groups in an unconsumed state, by ascending group id."""
        return [group for _, group in sorted(self._by_state[state].items())]

    def group(self, group_id: int) -> Group:
        """An unconsumed group.

        Raises: LedgerError: it was consumed or rejected, or never admitted.
        """
        if group_id not in self._unconsumed:
            raise LedgerError(f"group {group_id} is {self._state_of(group_id)}")
        return self._unconsumed[group_id]

    def is_finished(self, group_id: int, attempt: int) -> bool:
        """Whether the group is finished, with the rows of this attempt."""
        group = self._by_state[GroupState.finished].get(group_id)
        return group is not None and group.attempt == attempt

    def admit(self, prompt: PromptReference, version: int) -> Group:
        """A new group, queued, admitted under policy `version`."""
        group = Group(self._next_id, prompt, version)
        self._next_id += 1
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
        if group_id >= self._next_id:
            raise LedgerError(f"finish: group {group_id} is {self._state_of(group_id)}")
        group = self._by_state[GroupState.running].get(group_id)
        if group is None or group.attempt != attempt:
            return False
        expected = (group_id, attempt, group.admitted_version)
        if not batch.rows:
            raise LedgerError(
                f"finish: batch {batch.batch_id} of group {group_id} has no rows; "
                "a group without rows is rejected, with its cause"
            )
        for row in batch.rows:
            if (got := (row.group_id, row.attempt, row.admitted_version)) != expected:
                raise LedgerError(
                    f"finish: batch {batch.batch_id} holds a row of (group, attempt, admitted "
                    f"version) {got}, expected {expected}"
                )
        self._move(group, GroupState.finished)
        group.batch = batch
        return True

    def requeue(self, group_id: int) -> int:
        """running | finished -> queued: its worker or its rows are lost; returns the new attempt.

        The admission version, and with it the deadline, stays.
        """
        group = self._expect(
            group_id, "requeue", GroupState.queued, GroupState.running, GroupState.finished
        )
        self._requeue(group)
        return group.attempt

    def requeue_all(self) -> None:
        """Every unconsumed group -> queued with a new attempt: no worker of before is left."""
        for group in self.unconsumed():
            self._requeue(group)

    def reject(self, group_id: int, reason: str) -> Group:
        """queued | running | finished -> rejected, and refunded.

        Args:
            group_id: the group.
            reason: a category that is counted (`stale`, `reward_error`, ...), not a message: each
                distinct one is kept for the whole run.
        """
        group = self._expect(group_id, "reject", GroupState.rejected, *self._by_state)
        self._remove(group, GroupState.rejected)
        group.reject_reason = reason
        self._rejected[reason] += 1
        return group

    def consume(self, group_ids: Sequence[int], step: int) -> list[BatchMetadata]:
        """finished -> consumed by training step `step`; all of them, or none when one cannot be.

        Groups that an earlier step consumed are trained by now, or never.

        Returns: the groups' batches, in the order of `group_ids`; the ledger lets go of them.
        Raises: LedgerError: a group is not finished, is named twice, or was consumed before.
        """
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"consume at step {step}: a group is named twice in {group_ids}")
        groups = [
            self._expect(
                group_id, f"consume at step {step}", GroupState.consumed, GroupState.finished
            )
            for group_id in group_ids
        ]
        batches = []
        for group in groups:
            assert group.batch is not None
            batches.append(group.batch)
            self._remove(group, GroupState.consumed)
            group.consumed_step = step
        if step != self._untrained_step:
            self._untrained, self._untrained_step = set(), step
        self._untrained.update(group_ids)
        self._num_consumed += len(groups)
        self._rows_consumed += sum(batch.total_batch_size for batch in batches)
        return batches

    def record_trained(self, rows: Iterable[RowMetadata]) -> None:
        """Counts the rows that one training step was really given, once it is done.

        A row of a group that is not waiting to be trained, because an earlier call named it or a
        later step has begun, was trained twice, and is counted as such: the account says what
        happened, not what was meant to.

        Raises: LedgerError: a row's group was not consumed.
        """
        num_rows = Counter(row.group_id for row in rows)
        for group_id in num_rows:
            if group_id >= self._next_id or group_id in self._unconsumed:
                raise LedgerError(
                    f"trained on group {group_id}: expected consumed, "
                    f"it is {self._state_of(group_id)}"
                )
        for group_id, count in num_rows.items():
            self._rows_trained += count
            if group_id not in self._untrained:
                self._rows_trained_twice += count
        self._untrained.difference_update(num_rows)

    def account(self) -> dict[str, Any]:
        """Where every group ever admitted is, and what was trained.

        admitted == queued + running + finished + consumed + sum(rejected.values()), always.
        `rows_trained` and `rows_trained_twice` count what `record_trained` was told;
        `rows_consumed` what `consume` handed out.
        """
        account = {
            "admitted": self._next_id,
            "queued": self.num(GroupState.queued),
            "running": self.num(GroupState.running),
            "finished": self.num(GroupState.finished),
            "consumed": self._num_consumed,
            "rejected": dict(self._rejected),
            "rows_consumed": self._rows_consumed,
            "rows_trained": self._rows_trained,
            "rows_trained_twice": self._rows_trained_twice,
        }
        num_known = len(self._unconsumed) + self._num_consumed + self._rejected.total()
        assert self._next_id == num_known, f"groups were lost: {account}"
        return account

    def snapshot(self) -> LedgerState:
        """The whole ledger; `restore` is its inverse."""
        return LedgerState(
            self._next_id,
            tuple(copy(group) for group in self.unconsumed()),
            self._num_consumed,
            dict(self._rejected),
            self._rows_consumed,
            self._rows_trained,
            self._rows_trained_twice,
            self._untrained_step,
            tuple(sorted(self._untrained)),
        )

    @classmethod
    def restore(cls, state: LedgerState) -> Ledger:
        """The ledger that `state` was taken of, exactly.

        Where the workers of then are gone, `requeue_all` follows: unconsumed groups keep id and
        admission version, and are generated again as new attempts, so that "trained once" holds
        across restarts.
        """
        ledger = cls()
        for group in state.unconsumed:
            ledger._insert(copy(group))
        ledger._next_id = state.next_id
        ledger._num_consumed = state.num_consumed
        ledger._rejected = Counter(state.rejected)
        ledger._rows_consumed = state.rows_consumed
        ledger._rows_trained = state.rows_trained
        ledger._rows_trained_twice = state.rows_trained_twice
        ledger._untrained_step = state.untrained_step
        ledger._untrained = set(state.untrained)
        return ledger

    def _insert(self, group: Group) -> None:
        self._unconsumed[group.group_id] = group
        self._by_state[group.state][group.group_id] = group

    def _move(self, group: Group, state: GroupState) -> None:
        del self._by_state[group.state][group.group_id]
        group.state = state
        self._by_state[state][group.group_id] = group

    def _remove(self, group: Group, state: GroupState) -> None:
        del self._by_state[group.state][group.group_id]
        del self._unconsumed[group.group_id]
        group.state = state
        group.batch = None

    def _requeue(self, group: Group) -> None:
        self._move(group, GroupState.queued)
        group.attempt += 1
        group.worker = None
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
        if group_id >= self._next_id:
            return f"unknown ({self._next_id} groups were admitted)"
        if group_id not in self._unconsumed:
            return "consumed or rejected already"
        return self._unconsumed[group_id].state
