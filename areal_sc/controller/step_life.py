"""The life of one training step: from the first group of its batch to the version that it makes.

    forming ──form──► formed ──begin_update──► training ──record──► publishing ──publish──► forming
       ▲               │  ▲                       │                                  (the next step)
       └───take_back───┘  └──────begin_anew───────┴─undo─► undone
    each of them ──lose──► lost ──go_back──► forming

Three things make a step: the batch, whose rows may go; the ranks, which are asked to train it; and
the journal, which has the version before anybody is told of it. A model has one object for its
step. The rollout controller whose workers get the model's weights has the same one: see `take_in`.

Pure state: nothing here waits. A change that is not legal is an AssertionError.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from itertools import chain
from typing import Final

from areal_sc.controller.ledger.ledger_records import Split
from areal_sc.errors import BatchLost, StepsLost
from areal_sc.metadata import BatchMetadata, RowMetadata
from areal_sc.workers.calls import GroupAttempt


class StepState(StrEnum):
    """Where a step is.

    Attributes:
        forming: there is no batch, and the ranks are where the step begins.
        formed: the batch may be read, and the ranks are where the step begins.
        training: the ranks were asked for updates, by this start of the script or one before.
        publishing: the journal has the version, and nobody was told of it.
        undone: the ranks are where the step begins, although they were asked for updates.
        lost: the ranks are somewhere else, and do nothing before they are brought to a snapshot.
    """

    forming = "forming"
    formed = "formed"
    training = "training"
    publishing = "publishing"
    undone = "undone"
    lost = "lost"


LEGAL: Final = {
    StepState.forming: {StepState.formed, StepState.training, StepState.publishing, StepState.lost},
    StepState.formed: {
        StepState.forming,
        StepState.training,
        StepState.publishing,
        StepState.lost,
    },
    StepState.training: {*StepState},
    StepState.publishing: {StepState.forming, StepState.undone, StepState.lost},
    StepState.undone: {*StepState},
    StepState.lost: {StepState.forming},
}
"""The states that may follow on each one."""


class StepLife:
    """The step from one policy version to the next.

    Attributes:
        version: the policy version that the step begins from.
        batch: the rows that `prepare_batch` gives; None: they are not there yet.
        gone: groups of the batch whose rows are gone. The batch stays as it is until it is asked
            for again, since its rows may have been read.
        num_updates: updates that have returned.
        are_weights_told: rollout workers were told of the weights of `version`.
        why_lost: why the ranks do nothing; "": they are not lost.
    """

    def __init__(self) -> None:
        self.why_lost = ""
        self._begin(0)

    def _begin(self, version: int) -> None:
        self.version = self._recorded = version
        self.batch: BatchMetadata | None = None
        self.gone: set[int] = set()
        self.are_weights_told = False
        self._forget_updates()

    def _forget_updates(self) -> None:
        self.num_updates = 0
        self._updates: dict[int, tuple[Sequence[RowMetadata], Split]] = {}
        self._is_undone = False
        self._is_begun_before = False

    @property
    def state(self) -> StepState:
        """Where the step is."""
        if self.why_lost:
            return StepState.lost
        if self._is_undone:
            return StepState.undone
        if self._recorded > self.version:
            return StepState.publishing
        if self._updates or self._is_begun_before:
            return StepState.training
        return StepState.forming if self.batch is None else StepState.formed

    @property
    def trained_rows(self) -> list[RowMetadata]:
        """The rows that the updates of this step train."""
        return list(chain.from_iterable(rows for rows, _ in self._updates.values()))

    @property
    def splits(self) -> tuple[Split, ...]:
        """The split of each update; no one, where one trains other rows than those of the batch."""
        of_batch = [] if self.batch is None else _groups(self.batch.rows)
        are_of_batch = all(_groups(rows) == of_batch for rows, _ in self._updates.values())
        return tuple(split for _, split in self._updates.values()) if are_of_batch else ()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        before = self.state
        yield
        after = self.state
        assert after is before or after in LEGAL[before], f"{before} cannot become {after}"

    def check(self) -> None:
        """Raises: StepsLost: the ranks are lost."""
        if self.why_lost:
            raise StepsLost(self.why_lost)

    def take_in(self, other: StepLife) -> None:
        """A rollout controller turns out to get this model's weights: its batch is of this step.

        Args:
            other: the controller's step until now.
        """
        if other is not self and other.version == self.version:
            with self._changing():
                self.batch, self.gone = other.batch, other.gone

    def form(self, batch: BatchMetadata) -> None:
        """The batch is there."""
        assert self.batch is None, "the step has a batch"
        with self._changing():
            self.batch = batch

    def lose_rows(self, runs: Iterable[GroupAttempt]) -> list[GroupAttempt]:
        """The rows of these runs are gone; returns the runs that are not in the batch."""
        rows = self.batch.rows if self.batch is not None else ()
        in_batch = {GroupAttempt(row.group_id, row.attempt) for row in rows}
        runs = list(runs)
        self.gone |= {run.group_id for run in runs if run in in_batch}
        return [run for run in runs if run not in in_batch]

    def take_back(self) -> set[int]:
        """The batch is to be formed anew; returns its groups whose rows are gone.

        Raises: StepsLost: its rows count as trained, or an earlier start of the script has begun
            to train them, and nobody knows which of them were read.
        """
        if self._recorded > self.version or self._is_begun_before:
            raise StepsLost(
                f"rows of step {self.version + 1} are gone, and it was trained, or begun by an "
                "earlier start of the script: it cannot be repeated"
            )
        gone = self.gone
        with self._changing():
            self.batch, self.gone = None, set()
        return gone

    def begin_before(self) -> None:
        """An earlier start of the script has asked the ranks for updates of this step."""
        with self._changing():
            self._is_begun_before = True

    def begin_update(self, number: int, rows: Sequence[RowMetadata], split: Split = ()) -> None:
        """The ranks will train on these rows, even if the call is given up; repeats change nothing.

        Args:
            number: of the update in this step, from 0.
            split: which rank trains which of them.
        Raises: BatchLost: the updates before this one were undone.
        """
        if number:
            self._check_updates()
        with self._changing():
            if self._is_undone:
                self._forget_updates()
            self._updates.setdefault(number, (rows, split))

    def _check_updates(self) -> None:
        if self._is_undone:
            raise self.begin_anew("train workers died, and could not read them again")

    def undo(self) -> None:
        """The ranks have gone back to where the step begins: rows of it cannot be read again."""
        with self._changing():
            self._is_undone = bool(self.trained_rows)
            if not self._is_undone:
                self._updates.clear()

    def begin_anew(self, cause: str) -> BatchLost:
        """The ranks are where the step begins, and its batch is not trained.

        Returns: what the script is told.
        """
        with self._changing():
            self._forget_updates()
        return BatchLost(
            f"rows of the batch of policy version {self.version} are gone: {cause}. The weights "
            "are those of that version: call prepare_batch again, which forms its batch anew, and "
            "train on that one"
        )

    def record(self) -> None:
        """The journal has the version that this step makes."""
        assert not self._is_undone, "an undone step makes no version"
        with self._changing():
            self._recorded = self.version + 1

    def publish(self, version: int) -> None:
        """The step is done: the next one begins from the version that it has made.

        Raises: BatchLost: its updates were undone.
        """
        self._check_updates()
        with self._changing():
            self._begin(version)

    def lose(self, why: str) -> None:
        """The ranks are not where they were; the first reason counts."""
        with self._changing():
            self.why_lost = self.why_lost or why

    def go_back(self, version: int) -> None:
        """The ranks are at an earlier state, or at a later one of another history."""
        with self._changing():
            self.why_lost = ""
            self._begin(version)


def _groups(rows: Sequence[RowMetadata]) -> list[int]:
    return [row.group_id for row in rows]
