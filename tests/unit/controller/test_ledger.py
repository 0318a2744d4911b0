"""The ledger's states, one change at a time."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from areal_sc.controller.group import GroupState
from areal_sc.controller.ledger import Ledger, LedgerState
from areal_sc.errors import LedgerError
from areal_sc.metadata import BatchMetadata, PromptReference, RowMetadata

PROMPT = PromptReference(dataset=0, index=7, seed=3)


def batch_of(
    group_id: int, attempt: int = 0, admitted_version: int = 0, num_rows: int = 2
) -> BatchMetadata:
    row = RowMetadata(group_id, attempt, 9, 1.0, admitted_version, ((admitted_version, 5),), 0)
    return BatchMetadata(f"g{group_id}", 0, (), (row,) * num_rows)


def ledger_with_one(state: GroupState) -> Ledger:
    """Group 0 in `state`, reached by legal changes."""
    ledger = Ledger()
    ledger.admit(PROMPT, 0)
    if state in (GroupState.running, GroupState.finished, GroupState.consumed):
        ledger.start(0, "rollout/0")
    if state in (GroupState.finished, GroupState.consumed):
        assert ledger.finish(0, 0, batch_of(0))
    if state is GroupState.consumed:
        ledger.consume([0], 0)
    if state is GroupState.rejected:
        ledger.reject(0, "reward_error")
    return ledger


def test_a_group_lives_from_admission_to_training() -> None:
    ledger = Ledger()
    group = ledger.admit(PROMPT, 4)
    assert (group.group_id, group.prompt, group.admitted_version) == (0, PROMPT, 4)
    assert (group.attempt, group.state, group.worker) == (0, GroupState.queued, None)

    assert ledger.start(0, "rollout/1") == 0
    assert (group.state, group.worker) == (GroupState.running, "rollout/1")
    batch = batch_of(0, admitted_version=4)
    assert ledger.finish(0, 0, batch)
    assert (group.state, group.batch) == (GroupState.finished, batch)

    assert ledger.consume([0], 6) == [batch]
    assert (group.state, group.batch) == (GroupState.consumed, None)
    assert list(ledger.unconsumed()) == []
    ledger.record_trained(batch.rows)
    assert ledger.account() == {
        "admitted": 1,
        "queued": 0,
        "running": 0,
        "finished": 0,
        "consumed": 1,
        "rejected": {},
        "rows_consumed": 2,
        "rows_trained": 2,
        "rows_trained_twice": 0,
    }


CHANGES: dict[str, Callable[[Ledger], object]] = {
    "start": lambda ledger: ledger.start(0, "rollout/0"),
    "reject": lambda ledger: ledger.reject(0, "stale"),
    "consume": lambda ledger: ledger.consume([0], 1),
}
LEGAL = {
    "start": {GroupState.queued},
    "reject": {GroupState.queued, GroupState.running, GroupState.finished},
    "consume": {GroupState.finished},
}


@pytest.mark.parametrize("state", GroupState)
@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_made_from_its_states_only(change: str, state: GroupState) -> None:
    ledger = ledger_with_one(state)
    before = ledger.snapshot()
    if state in LEGAL[change]:
        CHANGES[change](ledger)
        assert ledger.snapshot() != before
    else:
        with pytest.raises(LedgerError, match=rf"{change}.* group 0 .*{state.value}"):
            CHANGES[change](ledger)
        assert ledger.snapshot() == before


@pytest.mark.parametrize("change", CHANGES)
def test_a_group_that_was_never_admitted_is_named(change: str) -> None:
    with pytest.raises(LedgerError, match=r"group 0 .*unknown"):
        CHANGES[change](Ledger())


def test_only_the_current_attempt_of_a_running_group_finishes() -> None:
    ledger = ledger_with_one(GroupState.running)
    ledger.requeue_all()
    assert not ledger.finish(0, 0, batch_of(0)), "queued again"
    assert ledger.start(0, "rollout/1") == 1
    assert not ledger.finish(0, 0, batch_of(0)), "an attempt of a lost worker"
    assert ledger.finish(0, 1, batch_of(0, attempt=1))
    assert not ledger.finish(0, 1, batch_of(0, attempt=1)), "finished already"
    ledger.consume([0], 0)
    assert not ledger.finish(0, 1, batch_of(0, attempt=1)), "consumed already"
    with pytest.raises(LedgerError, match="group 1 is unknown"):
        ledger.finish(1, 0, batch_of(1))


@pytest.mark.parametrize(
    "batch",
    [
        batch_of(1),
        batch_of(0, attempt=1),
        batch_of(0, admitted_version=1),
        batch_of(0, num_rows=0),
    ],
    ids=["other group", "other attempt", "other admission version", "no rows"],
)
def test_finish_refuses_rows_that_are_not_the_groups(batch: BatchMetadata) -> None:
    ledger = ledger_with_one(GroupState.running)
    with pytest.raises(LedgerError, match=r"group 0|expected"):
        ledger.finish(0, 0, batch)
    assert ledger.num(GroupState.running) == 1


def test_lost_workers_and_rows_start_the_groups_again() -> None:
    for state in (GroupState.running, GroupState.finished):
        ledger = ledger_with_one(state)
        ledger.requeue_all()
        (group,) = ledger.unconsumed()
        assert (group.state, group.worker, group.batch) == (GroupState.queued, None, None)
        assert group.attempt == 1
        assert ledger.num_admitted_not_rejected == 1


def test_a_rejected_group_is_refunded_and_counted_by_reason() -> None:
    ledger = Ledger()
    for _ in range(3):
        ledger.admit(PROMPT, 0)
    ledger.reject(1, "stale")
    ledger.reject(0, "reward_error")
    ledger.reject(2, "stale")
    assert ledger.num_admitted_not_rejected == 0
    assert ledger.account()["rejected"] == {"stale": 2, "reward_error": 1}
    assert ledger.admit(PROMPT, 1).group_id == 3, "an id is never used again"


def test_consume_takes_all_groups_or_none() -> None:
    ledger = Ledger()
    for group_id in range(3):
        ledger.admit(PROMPT, 0)
        ledger.start(group_id, "rollout/0")
    for group_id in range(2):
        ledger.finish(group_id, 0, batch_of(group_id))
    before = ledger.snapshot()
    for group_ids in ([0, 2], [0, 1, 0], [0, 3]):
        with pytest.raises(LedgerError, match="consume at step 5"):
            ledger.consume(group_ids, 5)
        assert ledger.snapshot() == before
    assert [batch.group_ids for batch in ledger.consume([1, 0], 5)] == [(1,), (0,)]


def test_rows_that_are_trained_again_are_counted() -> None:
    ledger = Ledger()
    for group_id in range(2):
        ledger.admit(PROMPT, 0)
        ledger.start(group_id, "rollout/0")
        ledger.finish(group_id, 0, batch_of(group_id, num_rows=3))
    first, second = ledger.consume([0, 1], 0)
    ledger.record_trained(second.rows)
    assert ledger.account()["rows_trained_twice"] == 0
    ledger.record_trained(first.rows + second.rows[:2])
    assert ledger.account()["rows_trained"] == 8
    assert ledger.account()["rows_trained_twice"] == 2


def test_training_on_a_group_that_was_not_consumed_is_an_error() -> None:
    ledger = ledger_with_one(GroupState.finished)
    with pytest.raises(LedgerError, match="group 0: expected consumed, it is finished"):
        ledger.record_trained(batch_of(0).rows)
    with pytest.raises(LedgerError, match="group 1: expected consumed, it is unknown"):
        ledger.record_trained(batch_of(1).rows)


def test_groups_come_in_order_of_admission_whatever_their_history() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.admit(PROMPT, 0)
    for group_id in (2, 0, 3):
        ledger.start(group_id, "rollout/0")
    ledger.finish(3, 0, batch_of(3))
    ledger.reject(1, "stale")
    assert [group.group_id for group in ledger.unconsumed()] == [0, 2, 3]
    ledger.requeue_all()
    assert [group.group_id for group in ledger.unconsumed()] == [0, 2, 3]


def test_a_snapshot_survives_msgpack_and_requeue_all_starts_the_rest_again() -> None:
    ledger = Ledger()
    for group_id in range(5):
        ledger.admit(PromptReference(0, group_id, 11), group_id)
    for group_id in (1, 2, 3, 4):
        ledger.start(group_id, "rollout/0")
    for group_id in (2, 3):
        ledger.finish(group_id, 0, batch_of(group_id, admitted_version=group_id))
    (trained,) = ledger.consume([3], 4)
    ledger.record_trained(trained.rows)
    ledger.reject(4, "timeout")

    packed = msgspec.msgpack.encode(ledger.snapshot())
    restored = Ledger.restore(msgspec.msgpack.decode(packed, type=LedgerState))
    assert restored.snapshot() == ledger.snapshot()
    assert restored.account() == ledger.account()
    assert [g.batch for g in restored.unconsumed()][2] == batch_of(2, admitted_version=2)

    restored.requeue_all()
    groups = [(g.group_id, g.prompt.index, g.attempt) for g in restored.unconsumed()]
    assert groups == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    assert [g.admitted_version for g in restored.unconsumed()] == [0, 1, 2]
    assert restored.num(GroupState.queued) == 3
    assert restored.admit(PROMPT, 5).group_id == 5
    with pytest.raises(LedgerError, match="consumed or rejected already"):
        restored.consume([3], 5)
    restored.record_trained(trained.rows)
    assert restored.account()["rows_trained_twice"] == 2, "also across a restart"


def test_the_ledgers_size_is_that_of_the_groups_in_flight() -> None:
    ledger = Ledger()
    for group_id in range(3000):
        ledger.admit(PROMPT, 0)
        if group_id % 10 == 0:
            ledger.reject(group_id, "stale")
            continue
        ledger.start(group_id, "rollout/0")
        ledger.finish(group_id, 0, batch_of(group_id))
        (batch,) = ledger.consume([group_id], group_id)
        ledger.record_trained(batch.rows)
    assert len(msgspec.msgpack.encode(ledger.snapshot())) < 200
    assert ledger.account()["rows_trained"] == 2 * 2700


def test_groups_that_are_consumed_and_never_trained_do_not_add_up() -> None:
    ledger = Ledger()
    for group_id in range(3000):
        ledger.admit(PROMPT, 0)
        ledger.start(group_id, "rollout/0")
        ledger.finish(group_id, 0, batch_of(group_id))
        (batch,) = ledger.consume([group_id], group_id)
        if group_id % 10:
            ledger.record_trained(batch.rows)
    assert len(msgspec.msgpack.encode(ledger.snapshot())) < 200
    account = ledger.account()
    assert (account["rows_trained"], account["rows_trained_twice"]) == (2 * 2700, 0)
