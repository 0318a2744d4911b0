"""A ledger's history, and its journal, without controllers."""

from __future__ import annotations

from pathlib import Path

from areal_sc.controller.ledger.journal import Journal
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import LedgerState
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata
from areal_sc.system.disk import Disk


class History:
    """A ledger that is written to a journal, without controllers."""

    def __init__(self, disk: Disk, folder: Path) -> None:
        self.journal = Journal(folder, disk)
        self.begin(LedgerState(), 1)

    def begin(self, state: LedgerState, lineage: int) -> None:
        """A new start, which goes back to that state."""
        if not hasattr(self, "ledger"):
            self.ledger = Ledger()
            self.ledger.go_back(lineage, state)
        self.journal.begin(self.ledger.snapshot)
        self.ledger.journal = self.journal.append
        self.ledger.go_back(lineage, state)

    def admit(self) -> int:
        prompt = PromptReference(0, 10 * self.ledger.num_prompts_taken, 7)
        return self.ledger.admit(
            self.ledger.returned_prompt or prompt, self.ledger.version
        ).group_id

    def run(self, group_id: int, worker: str = "rollout/0", *, num_rows: int = 2) -> None:
        group = self.ledger.get(group_id)
        assert group is not None
        attempt = self.ledger.start(group_id, worker)
        version = self.ledger.version
        spans = tuple((v, 5) for v in range(group.admitted_version, version + 1))
        row = RowMetadata(group_id, attempt, 9, 1.0, group.admitted_version, spans, 0)
        self.ledger.finish(group_id, attempt, BatchMetadata("b", 0, (), (row,) * num_rows))

    def train(self, *group_ids: int, left_out: int = 0) -> None:
        """A whole step; rows of the last group are left out."""
        batches = self.ledger.consume(group_ids, self.ledger.version)
        rows = [row for batch in batches for row in batch.rows]
        self.ledger.record_trained(rows[: len(rows) - left_out])
        self.ledger.publish(self.ledger.version + 1)
        self.ledger.release(self.ledger.version - 1)


def a_run(history: History) -> None:
    """Groups 0 and 1 trained, 1 at its second attempt; 2 rejected, 3 finished, 4 running, 5 not."""
    for _ in range(6):
        history.admit()
    history.run(0)
    history.ledger.start(1, "rollout/1")
    history.ledger.requeue(1, "worker lost")
    history.train(0)
    history.run(1, "rollout/2", num_rows=3)
    history.ledger.reject(2, "reward_error")
    history.train(1)
    history.run(3)
    history.ledger.start(4, "rollout/1")
