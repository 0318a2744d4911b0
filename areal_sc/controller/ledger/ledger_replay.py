"""Makes the changes of a journal's records again, in a ledger that holds the state before them."""

from __future__ import annotations

from collections.abc import Iterable

from areal_sc.controller.ledger import ledger_records as kinds
from areal_sc.controller.ledger.ledger import Ledger
from areal_sc.controller.ledger.ledger_records import Record
from areal_sc.errors import LedgerError


def replay(ledger: Ledger, records: Iterable[Record]) -> None:
    """Calls the methods that made the records; nothing is journalled.

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
