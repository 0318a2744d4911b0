"""The ledger: the truth about every group ever admitted.

    admit        start          finish           consume(step)
    -----> queued -----> running -----> finished ------------> consumed
              ^            |               | ^------------------'  take_back(step): rows are gone
              '------------'---------------'  requeue(cause): its worker is gone
              '------------'---------------'-----------------> rejected   reject(reason), go_back

A group is the completions of one prompt; its id is given once, in order of admission, and never
again. An infrastructure failure is no result: a new *attempt* of the same group starts, under the
same admission version, and what an earlier attempt still sends is ignored.

Pure state: nothing here waits, reads a clock or touches a file. Each change is first handed to the
`journal`, as a record, and made when that returns; `replay` makes the same changes from the
records. Rejected groups, and consumed ones once their step is released, leave nothing but counts,
so the ledger is as large as the groups in flight, however long the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

from msgspec.structs import replace

from areal_sc.controller.ledger import ledger_records as kinds
from areal_sc.controller.ledger.group import Group, GroupState, past_of
from areal_sc.controller.ledger.ledger_records import ConsumedStep, LedgerState, Record
from areal_sc.errors import LedgerError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.sources.prompt_choice import PromptPast


class Ledger:
    """Every group's state, and the counts that admission and the run's account need.

    Args:
        remembers_prompts: what prompts have given is kept, a few bytes each.

    Attributes:
        journal: receives each change before it is made; what it raises leaves the ledger as it
            was. None: nobody wants to know.
    """

    def __init__(self, *, remembers_prompts: bool = False) -> None:
        self.remembers_prompts = remembers_prompts
        self.journal: Callable[[Record], None] | None = None
        self._state = LedgerState()
        self._kept: dict[int, dict[int, Group]] = {}  # consumed groups by step, until release
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

    def get(self, group_id: int) -> Group | None:
        """The group, if it is queued, running or finished."""
        return self._unconsumed.get(group_id)

    def needs_rows(self, group_id: int, attempt: int) -> bool:
        """Whether the rows of this attempt wait to be trained, or are of a step that goes on."""
        groups = (of_step.get(group_id) for of_step in (self._unconsumed, *self._kept.values()))
        return any(g is not None and g.batch is not None and g.attempt == attempt for g in groups)

    def kept_groups(self, step: int) -> list[Group]:
        """The groups of a step that is kept, in the order of its batch."""
        return list(self._kept.get(step, {}).values())

    @property
    def lineage(self) -> int:
        """The lineage of the policies that the groups are for."""
        return self._state.lineage

    @property
    def version(self) -> int:
        """The newest policy version that was published."""
        return self._state.version

    @property
    def num_prompts_taken(self) -> int:
        """Position in the dataset, counted over all epochs."""
        return self._state.num_prompts_taken

    @property
    def returned_prompt(self) -> PromptReference | None:
        """The prompt to admit next, if one has come back from a rejected group."""
        returned = self._state.returned_prompts
        return returned[0] if returned else None

    def past(self, prompt: PromptReference) -> PromptPast | None:
        """What the prompt has given; None: nothing yet, or it is not remembered."""
        return self._state.past.get(prompt.dataset, {}).get(prompt.index)

    def admit(self, prompt: PromptReference, version: int, num_passed: int = 0) -> Group:
        """A new group, queued, admitted under policy `version`.

        Args:
            prompt: `returned_prompt`, which is let go of; if that is None, the next of the dataset.
            num_passed: prompts of the dataset before it that are passed over.
        Raises: LedgerError: another prompt has come back, and is first.
        """
        state, returned = self._state, self._state.returned_prompts
        if returned and (returned[0] != prompt or num_passed):
            raise LedgerError(f"admit: expected the returned prompt {returned[0]}, got {prompt}")
        num_taken = state.num_prompts_taken + (0 if returned else num_passed + 1)
        group = Group(state.next_id, prompt, version)
        self._write(kinds.Admit(group.group_id, prompt, version, num_taken))
        state.next_id += 1
        state.num_prompts_taken, state.returned_prompts = num_taken, returned[1:]
        self._insert(group)
        return group

    def start(self, group_id: int, worker: str) -> int:
        """queued -> running on `worker`; returns the attempt that its result must name."""
        group = self._expect(group_id, "start", GroupState.running, GroupState.queued)
        self._write(kinds.Start(group_id, group.attempt, worker))
        self._move(group, GroupState.running)
        group.worker = worker
        return group.attempt

    def finish(
        self,
        group_id: int,
        attempt: int,
        batch: BatchMetadata,
        metrics: dict[str, tuple[float, int]] | None = None,
    ) -> bool:
        """running -> finished with the rows of `batch`, and the metrics of the workflow.

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
        metrics = metrics or {}
        self._write(kinds.Finish(group_id, attempt, batch, metrics))
        self._move(group, GroupState.finished)
        group.batch, group.metrics = batch, metrics
        if self.remembers_prompts:
            past = self._state.past.setdefault(group.prompt.dataset, {})
            past[group.prompt.index] = past_of(batch, metrics, past.get(group.prompt.index))
        return True

    def requeue(self, group_id: int, cause: str) -> int:
        """queued | running | finished -> queued: its worker, or its rows, are gone.

        Id and admission version stay, and so do its deadline, and "trained once".

        Returns: the new attempt.
        """
        group = self._expect(group_id, "requeue", GroupState.queued, *_UNCONSUMED)
        self._write(kinds.Requeue(group_id, group.attempt + 1, cause))
        self._move(group, GroupState.queued)
        group.attempt += 1
        group.worker, group.batch, group.metrics = None, None, {}
        return group.attempt

    def reject(self, group_id: int, reason: str, *, returns_prompt: bool = False) -> None:
        """queued | running | finished -> rejected, and refunded.

        Args:
            reason: a category that is counted (`stale`, `reward_error`, ...), not a message: each
                distinct one is kept for the whole run.
            returns_prompt: its prompt is to be admitted again.
        """
        group = self._expect(group_id, "reject", GroupState.rejected, *_UNCONSUMED)
        self._write(kinds.Reject(group_id, group.attempt, reason, returns_prompt))
        self._remove(group, GroupState.rejected)
        group.batch = None
        state = self._state
        state.rejected[reason] = state.rejected.get(reason, 0) + 1
        if returns_prompt:
            state.returned_prompts += (group.prompt,)

    def consume(self, group_ids: Sequence[int], step: int) -> list[BatchMetadata]:
        """finished -> consumed by training step `step`; all of them, or none when one cannot be.

        Groups that an earlier step consumed are trained by now, or never.

        Returns: the groups' batches, in the order of `group_ids`; the ledger keeps them until the
            step is released.
        Raises: LedgerError: a group is not finished, is named twice, or was consumed before.
        """
        verb = f"consume at step {step}"
        if len(set(group_ids)) != len(group_ids):
            raise LedgerError(f"{verb}: a group is named twice in {group_ids}")
        groups = [
            self._expect(group_id, verb, GroupState.consumed, GroupState.finished)
            for group_id in group_ids
        ]
        state = self._state
        self._write(kinds.Consume(state.lineage, step, tuple(group_ids)))
        batches = []
        for group in groups:
            assert group.batch is not None
            batches.append(group.batch)
            self._remove(group, GroupState.consumed)
            self._kept.setdefault(step, {})[group.group_id] = group
        if step != state.untrained_step:
            state.untrained, state.untrained_step = set(), step
        state.untrained.update(group_ids)
        state.num_consumed += len(groups)
        state.rows_consumed += sum(batch.total_batch_size for batch in batches)
        return batches

    def take_back(self, step: int) -> list[Group]:
        """consumed -> finished: all groups of a step, before any of them is trained.

        Groups whose rows are gone are to be requeued then.

        Raises: LedgerError: the step is not the newest one, or some of its rows were trained.
        """
        state, groups = self._state, self._kept.get(step, {})
        if not groups or step != state.untrained_step or state.untrained != groups.keys():
            raise LedgerError(
                f"take back step {step}: expected {len(groups)} untrained groups, got "
                f"{len(state.untrained)} of step {state.untrained_step}"
            )
        self._write(kinds.TakeBack(state.lineage, step))
        del self._kept[step]
        state.untrained = set()
        state.num_consumed -= len(groups)
        for group in groups.values():
            assert group.batch is not None
            state.rows_consumed -= group.batch.total_batch_size
            group.state = GroupState.finished
            self._insert(group)
        self._unconsumed = dict(sorted(self._unconsumed.items()))
        return list(groups.values())

    def was_taken_back(self, row: RowMetadata) -> bool:
        """Whether its group was given for training, and is not any more, or as another attempt."""
        of_steps = (of_step.get(row.group_id) for of_step in self._kept.values())
        group = self._unconsumed.get(row.group_id) or next(filter(None, of_steps), None)
        is_consumed = group is not None and group.state is GroupState.consumed
        return group is not None and not (is_consumed and group.attempt == row.attempt)

    def record_trained(
        self, rows: Iterable[RowMetadata], splits: tuple[kinds.Split, ...] = ()
    ) -> None:
        """Counts the rows that one training step was really given, once it is done.

        A row of a group that is not waiting to be trained, because an earlier call named it or a
        later step has begun, counts as trained twice.

        Args:
            splits: see `Trained`.
        Raises: LedgerError: a row's group was not consumed.
        """
        self.record_trained_counts(Counter(row.group_id for row in rows), splits)

    def record_trained_counts(
        self, num_rows: Mapping[int, int], splits: tuple[kinds.Split, ...] = ()
    ) -> None:
        """Counts trained rows like `record_trained`, from the number of rows of each group."""
        for group_id in num_rows:
            if group_id >= self._state.next_id or group_id in self._unconsumed:
                raise LedgerError(
                    f"trained on group {group_id}: expected consumed, "
                    f"it is {self._state_of(group_id)}"
                )
        state = self._state
        self._write(kinds.Trained(state.lineage, state.version, dict(num_rows), splits))
        for group_id, count in num_rows.items():
            state.rows_trained += count
            if group_id not in state.untrained:
                state.rows_trained_twice += count
        state.untrained.difference_update(num_rows)

    def publish(self, version: int) -> None:
        """A new policy version exists.

        Raises: LedgerError: it is not above the one before.
        """
        if version <= self._state.version:
            raise LedgerError(f"publish: version {version} follows version {self._state.version}")
        self._write(kinds.Publish(self._state.lineage, version))
        self._state.version = version

    def release(self, step: int) -> None:
        """Steps up to `step` are complete: the ledger lets go of their batches."""
        released = [kept for kept in self._kept if kept <= step]
        if released:
            self._write(kinds.Release(max(released)))
        for kept in released:
            del self._kept[kept]

    def go_back(self, lineage: int, state: LedgerState) -> None:
        """A new lineage goes on from an earlier state; see `gone_back`. No group is left.

        Nothing is recorded where nothing changes.

        Raises: LedgerError: the lineage is older than that of the ledger.
        """
        if lineage < self._state.lineage:
            raise LedgerError(f"go back: lineage {lineage} follows lineage {self._state.lineage}")
        begun = kinds.gone_back(self._state, lineage, state)
        if begun == self.snapshot():
            return
        self._write(kinds.GoBack(begun))
        self._state = _copy(begun, (), ())
        self._kept.clear()
        self._unconsumed.clear()
        self._num_in.clear()

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
        kept = (ConsumedStep(step, _copies(of.values())) for step, of in self._kept.items())
        return _copy(self._state, _copies(self.unconsumed()), tuple(kept))

    @classmethod
    def restore(cls, state: LedgerState, *, remembers_prompts: bool = False) -> Ledger:
        """The ledger that `state` was taken of, exactly."""
        ledger = cls(remembers_prompts=remembers_prompts)
        ledger._state = _copy(state, (), ())
        for group in state.unconsumed:
            ledger._insert(copy(group))
        for kept in state.kept:
            ledger._kept[kept.step] = {g.group_id: g for g in _copies(kept.groups)}
        return ledger

    def _write(self, record: Record) -> None:
        if self.journal is not None:
            self.journal(record)

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


def _copy(
    state: LedgerState, unconsumed: tuple[Group, ...], kept: tuple[ConsumedStep, ...]
) -> LedgerState:
    rejected, untrained = dict(state.rejected), set(state.untrained)
    past = {dataset: dict(of) for dataset, of in state.past.items()}
    return replace(
        state, unconsumed=unconsumed, rejected=rejected, untrained=untrained, kept=kept, past=past
    )


def _copies(groups: Iterable[Group]) -> tuple[Group, ...]:
    return tuple(map(copy, groups))


def replay(ledger: Ledger, records: Iterable[Record]) -> None:
    """Makes the changes of records again, in a ledger that holds the state before them.

    It calls the methods that made the records; nothing is journalled.

    Raises: LedgerError: a record does not follow on the state; those before it did.
    """
    journal = ledger.journal
    try:
        for record in records:
            _repeat(ledger, record)
    finally:
        ledger.journal = journal


def _repeat(ledger: Ledger, record: Record) -> None:
    """Calls the method that made the record; it must make it again."""

    def compare(made: Record | None) -> None:
        ledger.journal = None
        if made != record:
            raise LedgerError(
                f"replay: the journal holds {record}, but the state before it gives {made}: "
                "records are missing or repeated"
            )

    ledger.journal = compare
    match record:
        case kinds.Admit(prompt=prompt, version=version):
            num_passed = max(0, record.num_prompts_taken - ledger.num_prompts_taken - 1)
            ledger.admit(prompt, version, num_passed)
        case kinds.Start(group_id=group_id, worker=worker):
            ledger.start(group_id, worker)
        case kinds.Finish():
            ledger.finish(record.group_id, record.attempt, record.batch, record.metrics)
        case kinds.Requeue(group_id=group_id, cause=cause):
            ledger.requeue(group_id, cause)
        case kinds.Reject(group_id=group_id, reason=reason, returns_prompt=returns_prompt):
            ledger.reject(group_id, reason, returns_prompt=returns_prompt)
        case kinds.Consume(group_ids=group_ids, step=step):
            ledger.consume(group_ids, step)
        case kinds.TakeBack(step=step):
            ledger.take_back(step)
        case kinds.Trained(num_rows=num_rows, splits=splits):
            ledger.record_trained_counts(num_rows, splits)
        case kinds.Publish(version=version):
            ledger.publish(version)
        case kinds.Release(step=step):
            ledger.release(step)
        case kinds.GoBack(state=state):
            ledger.go_back(state.lineage, state)
    if ledger.journal is compare:
        compare(None)
