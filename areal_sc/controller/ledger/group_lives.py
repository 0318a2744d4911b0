"""The life of each group of a run, and of each of its rows, from the ledger's whole journal.

    prompt ─► admitted ─► started on a worker ─► rows, with rewards ─► batch of a step
                 ▲               │  lost                 │ lost            │ rank, minibatch
                 └── next attempt ◄──────────────────────┘                 ▼
                                                                     version that it made

Steps are numbered by the version that they make, as in `metrics.jsonl`; the ledger itself numbers
them by the one that they begin from.

    from areal_sc.controller.ledger.group_lives import group_lives

    for group in group_lives("runs/minimal"):
        for attempt in group.attempts:
            for row in attempt.rows:
                print(group.index, attempt.worker, row.reward, row.rank, row.fate, row.why)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal_sc.controller.ledger import ledger_records as kinds
from areal_sc.controller.ledger.journal import read_segments
from areal_sc.controller.ledger.ledger_records import LedgerState, Split
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.run.run_files import RunFiles
from areal_sc.system.disk import Disk


class RowFate(StrEnum):
    """What has become of a row.

    waiting: it is there, and no step was trained with it yet.
    trained: it made a version.
    lost: it was gone before that; its group ran again.
    rejected: its group is not trained.
    undone: a step was trained with it, or was to be; then the run went back behind that step.
    """

    waiting = "waiting"
    trained = "trained"
    lost = "lost"
    rejected = "rejected"
    undone = "undone"


@dataclass
class RowLife:
    """A row.

    Attributes:
        episode: number within the group, from 0.
        row: number within the episode, from 0.
        num_tokens: with those of the prompt.
        versions: (policy version, number of trained tokens that it sampled), ascending.
        why: it was lost, rejected or undone; "" otherwise.
        step: that consumed it last; None: none has.
        place: of the row in that step's batch, from 0.
        rank, minibatch: data rank that trained it, and the update, counted over the step, from 0.
            None: it was not trained, or more is trained than the batch, or an earlier areal_sc did
            not say.
        version: that it made; None: none.
    """

    episode: int
    row: int
    reward: float
    num_tokens: int
    versions: tuple[tuple[int, int], ...]
    fate: RowFate = RowFate.waiting
    why: str = ""
    step: int | None = None
    place: int | None = None
    rank: int | None = None
    minibatch: int | None = None
    version: int | None = None

    @property
    def num_interruptions(self) -> int:
        """How often new weights came between two of its trained tokens."""
        return max(0, len(self.versions) - 1)


@dataclass
class AttemptLife:
    """A run of a group on a worker.

    Attributes:
        attempt: from 0.
        rows: that it gave.
        why: it gave none, or they were lost; "" otherwise.
    """

    attempt: int
    worker: str
    rows: list[RowLife] = field(default_factory=list)
    why: str = ""


@dataclass
class PromptLife:
    """A group, that is a prompt and its attempts.

    Attributes:
        lineage: of the weights when it was admitted.
        dataset, index: its prompt.
        attempts: in order.
        rejected: why it is not trained; "": it is, or may be.
        events: what happened to it since there is a journal, in order: `what` names it.
    """

    group: int
    lineage: int
    dataset: int
    index: int
    admitted_version: int
    attempts: list[AttemptLife] = field(default_factory=list)
    rejected: str = ""
    events: list[dict[str, Any]] = field(default_factory=list)

    def note(self, what: str, **values: Any) -> None:
        """Adds an event."""
        self.events.append({"what": what, **values})

    @property
    def rows(self) -> list[RowLife]:
        """The rows of the last attempt."""
        return self.attempts[-1].rows if self.attempts else []


def group_lives(run: str | Path) -> Iterator[PromptLife]:
    """The groups of a run in the order of their admission; also while it goes on.

    Args:
        run: its folder.
    Raises: RunFolderError: there is no journal, or it is damaged, or of another format.
    """
    yield from read_lives(RunFiles(run).ledger, Disk()).values()


def read_lives(ledger: Path, disk: Disk, groups: Set[int] | None = None) -> dict[int, PromptLife]:
    """The same by their ids, from the folder of the journal.

    Args:
        groups: whose lives are kept; None: all of them.
    """
    lives: _PromptLives | None = None
    for _, segment, _ in read_segments(ledger, disk):
        lives = lives or _PromptLives(segment.state, groups)
        for record in segment.records:
            lives.read(record)
    return {} if lives is None else lives.groups


class _PromptLives:
    """Follows the records from a first state on.

    Args:
        wanted: groups whose lives are kept; None: all of them.

    Attributes:
        groups: by their ids.
    """

    def __init__(self, state: LedgerState, wanted: Set[int] | None) -> None:
        self.groups: dict[int, PromptLife] = {}
        self._wanted = wanted
        self._num_rows = dict[int, int]()  # of other groups, for the places of rows in batches
        self._lineage = state.lineage
        self._open = dict[int, None]()  # groups that were not rejected, nor undone
        self._batch = dict[int, RowLife]()  # of the newest step, by their places
        self._consumed: Iterable[int] = ()  # groups of that
        self._trained: Iterable[int] = ()  # those of them that make the next version
        kept = [group for step in state.kept for group in step.groups]
        for group in [*kept, *state.unconsumed]:  # of before there was a journal
            self._admit(group.group_id, group.prompt, group.admitted_version)
            if group.group_id not in self.groups:
                self._num_rows[group.group_id] = len(group.batch.rows) if group.batch else 0
            elif group.worker is not None:
                rows = _rows_of(group.batch) if group.batch else []
                attempt = AttemptLife(group.attempt, group.worker, rows)
                self.groups[group.group_id].attempts.append(attempt)

    def _admit(self, group: int, prompt: PromptReference, version: int) -> None:
        if self._wanted is None or group in self._wanted:
            place = prompt.dataset, prompt.index
            self.groups[group] = PromptLife(group, self._lineage, *place, version)
            self._open[group] = None

    def read(self, record: kinds.Record) -> None:
        """Goes on by the next one."""
        match record:
            case kinds.Finish(group_id=group, batch=batch) if group not in self.groups:
                self._num_rows[group] = len(batch.rows)
            case (
                kinds.Start(group_id=group)
                | kinds.Requeue(group_id=group)
                | kinds.Reject(group_id=group)
            ) if group not in self.groups:
                pass
            case kinds.Admit(group_id=group, prompt=prompt, version=version):
                self._admit(group, prompt, version)
                place = {"dataset": prompt.dataset, "index": prompt.index, "seed": prompt.seed}
                self._note([group], "admitted", version=version, **place)
            case kinds.Start(group_id=group, attempt=attempt, worker=worker):
                self.groups[group].attempts.append(AttemptLife(attempt, worker))
                self._note([group], "started", attempt=attempt, worker=worker)
            case kinds.Finish(group_id=group, attempt=attempt, batch=batch):
                rows = self.groups[group].attempts[-1].rows = _rows_of(batch)
                self._note([group], "finished", attempt=attempt, rows=rows)
            case kinds.Requeue(group_id=group, attempt=attempt, cause=cause):
                if self.groups[group].attempts:  # else it had not begun
                    self.groups[group].attempts[-1].why = cause
                _end(self.groups[group].rows, RowFate.lost, cause)
                self._note([group], "requeued", attempt=attempt, cause=cause)
            case kinds.Reject(group_id=group, reason=reason, returns_prompt=returns):
                self._reject(group, reason)
                self._note([group], "rejected", cause=reason, returns_prompt=returns)
            case kinds.Consume(group_ids=ids, step=step, lineage=lineage):
                self._place(ids)
                for number, row in self._batch.items():
                    row.step, row.place = step + 1, number
                self._consumed = ids
                self._note(ids, "consumed", step=step + 1, lineage=lineage)
            case kinds.TakeBack(step=step):
                for row in self._batch.values():
                    row.step = row.place = None
                self._batch = {}
                self._note(self._consumed, "taken back", step=step + 1)
            case kinds.Trained(num_rows=num_rows, splits=splits, step=step):
                self._train(num_rows, splits)
                self._trained = num_rows
                self._note(num_rows, "trained", step=step + 1)
            case kinds.Publish(version=version):
                for row in self._batch.values():
                    if row.fate is RowFate.trained:
                        row.version = version
                self._note(self._trained, "published", version=version)
                self._trained = ()
            case kinds.GoBack(state=state):
                self._go_back(state)

    def _note(self, groups: Iterable[int], what: str, **values: Any) -> None:
        for group in groups:
            if group in self.groups:
                self.groups[group].note(what, **values)

    def _place(self, groups: Iterable[int]) -> None:
        """The rows of these groups, in this order, are a batch."""
        self._batch, first = {}, 0
        for group in groups:
            if group in self.groups:
                rows = self.groups[group].rows
                self._batch.update(enumerate(rows, first))
                first += len(rows)
            else:
                first += self._num_rows[group]

    def _reject(self, group: int, reason: str) -> None:
        self._open.pop(group, None)
        self.groups[group].rejected = reason
        _end(self.groups[group].rows, RowFate.rejected, reason)

    def _train(self, num_rows: dict[int, int], splits: Sequence[Split]) -> None:
        first = 0
        for split in splits:
            for rank, minibatches in enumerate(split):
                for number, places in enumerate(minibatches):
                    for place in self._batch.keys() & places:
                        row = self._batch[place]
                        row.rank, row.minibatch = rank, first + number
            first += max(map(len, split), default=0)
        for group in num_rows.keys() & self.groups.keys():
            count, rows = num_rows[group], self.groups[group].rows
            for row in rows:
                if row.rank is not None or count >= len(rows):
                    row.fate = RowFate.trained
                elif not splits:
                    row.fate, row.why = RowFate.lost, f"{count} rows of its group were trained"
        for row in self._batch.values():
            if row.fate is RowFate.waiting:
                row.fate, row.why = RowFate.lost, "its step was trained without it"

    def _go_back(self, state: LedgerState) -> None:
        """Nothing counts that was done since that state."""
        self._lineage, self._batch, self._trained = state.lineage, {}, ()
        why = f"the run went back to version {state.version}"
        for group in list(self._open):
            rows = self.groups[group].rows
            is_consumed = bool(rows) and rows[0].step is not None
            if is_consumed and all((row.step or 0) <= state.version for row in rows):
                continue
            self._note([group], "went back", version=state.version, lineage=state.lineage)
            if is_consumed:
                del self._open[group]
                _end(rows, RowFate.undone, why)
            else:
                self._reject(group, why)


def _rows_of(batch: BatchMetadata) -> list[RowLife]:
    counts: dict[int, int] = {}
    rows = []
    for row in batch.rows:
        number = counts[row.episode] = counts.get(row.episode, -1) + 1
        rows.append(
            RowLife(row.episode, number, row.reward, row.sequence_length, row.version_spans)
        )
    return rows


def _end(rows: Sequence[RowLife], fate: RowFate, why: str) -> None:
    for row in rows:
        row.fate, row.why = fate, why
