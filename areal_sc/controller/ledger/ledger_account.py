"""The account of a run, read from its journal: what became of every group, in which history.

A history is a lineage's, up to the version that a later lineage begins from. A step that was made
after that is *undone*: prompts of its groups run again in the later lineage, as other groups.

Nothing is held in memory but the groups in flight, so that a run of weeks can be read, also while
it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from areal_sc.controller.ledger import ledger_records as kinds
from areal_sc.controller.ledger.group import Group
from areal_sc.controller.ledger.journal import Segment, read_segments
from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.controller.ledger.ledger_records import WENT_BACK, LedgerState, Record
from areal_sc.errors import LedgerError, RunFolderError
from areal_sc.system.disk import Disk


@dataclass
class GroupAccount:
    """What became of a group.

    Attributes:
        outcome: `queued`, `running`, `finished`, `consumed` by a step whose training is not
            recorded (yet), `trained`, or `rejected`.
        is_undone: a step consumed it, and a later lineage begins before that.
        attempt: the number of the last one, from 0.
        worker: who ran it last; None: nobody has.
        step: that consumed it; -1: none.
        versions: lowest and highest policy version that sampled a trained token.
        num_rows: that the group has.
        num_trained: times that rows of it were trained.
        cause: why it was rejected.
    """

    lineage: int
    group: int
    outcome: str
    is_undone: bool
    dataset: int
    index: int
    admitted_version: int
    attempt: int
    worker: str | None
    step: int = -1
    versions: tuple[int, int] | None = None
    num_rows: int = 0
    num_trained: int = 0
    cause: str = ""


@dataclass
class LineageAccount:
    """What one lineage did.

    Attributes:
        begun_at: the policy version that it began from.
        version: its newest policy version.
        counts_to: the newest one that no later lineage has undone.
    """

    lineage: int
    begun_at: int
    version: int
    counts_to: int


@dataclass
class RunAccount:
    """What a run did, but for what was undone.

    Attributes:
        totals: `Ledger.account` at the end.
        rows_lost: consumed by a step that is over, and never trained.
        trained_again: (group, step) that trained rows of it, although another step had them.
        lineages: oldest first; those that published nothing, and gave their place to the next one,
            are among them.
        version: the newest policy version.
        num_undone: groups whose step was undone.
        num_bytes: of the journal.
        num_cut_bytes: at its end, of a record that was cut short, or is being written.
    """

    totals: dict[str, Any] = field(default_factory=dict)
    rows_lost: int = 0
    trained_again: list[tuple[int, int]] = field(default_factory=list)
    lineages: list[LineageAccount] = field(default_factory=list)
    version: int = 0
    num_undone: int = 0
    num_bytes: int = 0
    num_cut_bytes: int = 0


def read_account(
    folder: Path, note: Callable[[GroupAccount], None], disk: Disk | None = None
) -> RunAccount:
    """Reads the journal in a folder.

    Args:
        note: is told of each group, once nothing more can become of it; in the end of the others.
    Raises: RunFolderError: there is no journal, or it is damaged, or of another format.
    """
    disk = disk or Disk()
    lineages = _lineages(segment for _, segment, _ in read_segments(folder, disk))
    reader: _Reader | None = None
    account, before = RunAccount(lineages=lineages), folder
    for path, segment, num_bytes in read_segments(folder, disk):
        if account.num_cut_bytes:
            raise RunFolderError(f"{before} is damaged: it ends within a record")
        before, account.num_cut_bytes = path, num_bytes - segment.num_bytes
        account.num_bytes += num_bytes
        try:
            reader = reader or _Reader(segment.state, account, note)
            reader.check(segment.state)
            for record in segment.records:
                reader.read(record)
        except LedgerError as error:
            raise RunFolderError(f"{path} does not follow on what is before it: {error}") from error
    assert reader is not None
    reader.end()
    return account


def _lineages(segments: Iterable[Segment]) -> list[LineageAccount]:
    """All lineages, oldest first."""
    found: list[LineageAccount] = []

    def begin(state: LedgerState) -> None:
        for earlier in found:
            earlier.counts_to = min(earlier.counts_to, state.version)
        version = state.version
        found.append(LineageAccount(state.lineage, version, version, version))

    for segment in segments:
        if not found:
            begin(segment.state)
        for record in segment.records:
            if isinstance(record, kinds.GoBack):
                begin(record.state)
            elif isinstance(record, kinds.Publish):
                found[-1].version = found[-1].counts_to = record.version
    return found


def _packed(state: LedgerState) -> bytes:
    """The state but for what prompts have given, which no group depends on."""
    return msgspec.msgpack.encode(replace(state, past={}), order="deterministic")


class _Reader:
    """Follows the ledger from its first state on.

    Args:
        account: with its lineages; gets all else.
    """

    def __init__(
        self, state: LedgerState, account: RunAccount, note: Callable[[GroupAccount], None]
    ) -> None:
        self.ledger = Ledger.restore(state)
        self._account = account
        self._later = account.lineages[1:]  # those that have not begun yet
        self._note = note
        self._of_step: dict[int, GroupAccount] = {}  # of the newest one

    def check(self, state: LedgerState) -> None:
        """Raises: LedgerError: the ledger is not in this state, which a segment begins with."""
        if _packed(self.ledger.snapshot()) != _packed(state):
            raise LedgerError("its first record is another state; records are missing or repeated")

    def read(self, record: Record) -> None:
        match record:
            case kinds.GoBack():
                self._end_step()
                self._later = self._later[1:]
                for group in list(self.ledger.unconsumed()):
                    self._end(self._group(group.group_id, "rejected", cause=WENT_BACK))
            case kinds.Reject(group_id=group_id, reason=reason):
                self._end(self._group(group_id, "rejected", cause=reason))
            case kinds.Consume(group_ids=group_ids, step=step):
                if any(group.step != step for group in self._of_step.values()):
                    self._end_step()
                for group_id in group_ids:
                    self._of_step[group_id] = self._group(group_id, "consumed", step=step)
            case kinds.TakeBack():
                self._of_step.clear()
            case kinds.Trained(num_rows=num_rows, step=step):
                for group_id, count in num_rows.items():
                    if group_id in self._of_step:
                        self._of_step[group_id].outcome = "trained"
                        self._of_step[group_id].num_trained += count
                    else:
                        self._account.trained_again.append((group_id, step))
        replay(self.ledger, [record])

    def _end_step(self) -> None:
        """The newest step is over: what it has not trained never will be."""
        for group in self._of_step.values():
            if not group.is_undone:
                self._account.rows_lost += max(0, group.num_rows - group.num_trained)
            self._end(group)
        self._of_step.clear()

    def end(self) -> None:
        """The journal ends here."""
        for group in [*self._of_step.values(), *map(self._of, self.ledger.unconsumed())]:
            self._note(group)
        self._account.version = self.ledger.version
        self._account.totals = self.ledger.account()

    def _end(self, group: GroupAccount) -> None:
        self._account.num_undone += group.is_undone
        self._note(group)

    def _group(
        self, group_id: int, outcome: str, *, step: int = -1, cause: str = ""
    ) -> GroupAccount:
        group = self.ledger.get(group_id)
        if group is None:
            raise LedgerError(f"group {group_id} was {outcome}, and is not in flight")
        account = self._of(group)
        account.outcome, account.step, account.cause = outcome, step, cause
        account.is_undone = any(later.begun_at <= step for later in self._later)
        return account

    def _of(self, group: Group) -> GroupAccount:
        rows = group.batch.rows if group.batch else ()
        versions = [version for row in rows for version, _ in row.version_spans]
        return GroupAccount(
            lineage=self.ledger.lineage,
            group=group.group_id,
            outcome=group.state.value,
            is_undone=False,
            dataset=group.prompt.dataset,
            index=group.prompt.index,
            admitted_version=group.admitted_version,
            attempt=group.attempt,
            worker=group.worker,
            versions=(min(versions), max(versions)) if versions else None,
            num_rows=len(rows),
        )
