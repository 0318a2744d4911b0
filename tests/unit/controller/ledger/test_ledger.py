"""The ledger's states, one change at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.controller.ledger.ledger_records import WENT_BACK, LedgerState, Record
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
    assert group.state is GroupState.consumed
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


def test_rows_are_needed_until_their_step_is_released() -> None:
    ledger = ledger_with_one(GroupState.finished)
    assert [ledger.needs_rows(0, attempt) for attempt in (0, 1)] == [True, False]
    ledger.consume([0], 3)
    assert [ledger.needs_rows(0, attempt) for attempt in (0, 1)] == [True, False]
    ((step, (group,)),) = [(kept.step, kept.groups) for kept in ledger.snapshot().kept]
    assert (step, group.batch) == (3, batch_of(0)), "it can be repeated"
    ledger.release(2)
    assert ledger.needs_rows(0, 0)
    ledger.release(3)
    assert not ledger.needs_rows(0, 0)
    assert ledger.snapshot().kept == ()
    assert not ledger_with_one(GroupState.running).needs_rows(0, 0)


def test_a_returned_prompt_is_admitted_before_the_next_of_the_dataset() -> None:
    ledger = Ledger()
    prompts = [PromptReference(0, index, 3) for index in range(4)]
    for prompt in prompts[:3]:
        ledger.admit(prompt, 0)
    ledger.reject(2, "stale", returns_prompt=True)
    ledger.reject(0, "stale", returns_prompt=True)
    ledger.reject(1, "reward_error")
    with pytest.raises(LedgerError, match="expected the returned prompt"):
        ledger.admit(prompts[3], 1)
    for prompt in (prompts[2], prompts[0]):
        assert ledger.returned_prompt == prompt
        assert ledger.num_prompts_taken == 3
        ledger.admit(prompt, 1)
    assert ledger.returned_prompt is None
    ledger.admit(prompts[3], 1)
    assert ledger.num_prompts_taken == 4


def test_versions_follow_each_other() -> None:
    ledger = Ledger()
    ledger.publish(1)
    for version in (0, 1):
        with pytest.raises(LedgerError, match=f"version {version} follows version 1"):
            ledger.publish(version)
    assert ledger.version == 1


CHANGES: dict[str, Callable[[Ledger], object]] = {
    "start": lambda ledger: ledger.start(0, "rollout/0"),
    "requeue": lambda ledger: ledger.requeue(0, "worker lost"),
    "reject": lambda ledger: ledger.reject(0, "stale"),
    "consume": lambda ledger: ledger.consume([0], 1),
}
LEGAL = {
    "start": {GroupState.queued},
    "requeue": {GroupState.queued, GroupState.running, GroupState.finished},
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
    assert ledger.requeue(0, "worker lost") == 1
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
        ledger.requeue(0, "worker lost")
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


def test_a_step_is_taken_back_until_it_is_trained() -> None:
    ledger = Ledger()
    for group_id in range(3):
        ledger.admit(PROMPT, 0)
        ledger.start(group_id, "rollout/0")
        ledger.finish(group_id, 0, batch_of(group_id))
    before = ledger.snapshot()
    (row, *_) = batch_of(0).rows
    ledger.consume([0, 2], 0)
    assert not ledger.was_taken_back(row)
    assert [group.group_id for group in ledger.take_back(0)] == [0, 2]
    assert ledger.snapshot() == before
    assert ledger.was_taken_back(row)
    ledger.requeue(0, "its rows are gone")
    ledger.start(0, "rollout/1")
    ledger.finish(0, 1, batch_of(0, attempt=1))
    batches = ledger.consume([0, 1], 0)
    assert ledger.was_taken_back(row)
    assert not ledger.was_taken_back(batches[0].rows[0])
    ledger.record_trained(batches[0].rows)
    for step in (0, 1):
        with pytest.raises(LedgerError, match=f"take back step {step}"):
            ledger.take_back(step)
    ledger.record_trained(batches[1].rows)
    assert ledger.account()["rows_trained_twice"] == 0


def test_groups_come_in_order_of_admission_whatever_their_history() -> None:
    ledger = Ledger()
    for _ in range(4):
        ledger.admit(PROMPT, 0)
    for group_id in (2, 0, 3):
        ledger.start(group_id, "rollout/0")
    ledger.finish(3, 0, batch_of(3))
    ledger.reject(1, "stale")
    assert [group.group_id for group in ledger.unconsumed()] == [0, 2, 3]
    for group_id in (3, 0, 2):
        ledger.requeue(group_id, "worker lost")
    assert [group.group_id for group in ledger.unconsumed()] == [0, 2, 3]


def test_a_snapshot_survives_msgpack() -> None:
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

    for group in restored.unconsumed():
        restored.requeue(group.group_id, "restart")
    groups = [(g.group_id, g.prompt.index, g.attempt) for g in restored.unconsumed()]
    assert groups == [(0, 0, 1), (1, 1, 1), (2, 2, 1)]
    assert [g.admitted_version for g in restored.unconsumed()] == [0, 1, 2]
    assert restored.num(GroupState.queued) == 3
    assert restored.admit(PROMPT, 5).group_id == 5
    with pytest.raises(LedgerError, match="consumed or rejected already"):
        restored.consume([3], 5)
    restored.record_trained(trained.rows)
    assert restored.account()["rows_trained_twice"] == 2, "also across a restart"


def a_change(ledger: Ledger, draw: st.DrawFn, earlier: Sequence[LedgerState] = ()) -> None:
    """One change of any kind that the state allows; it may go back to an earlier one."""
    groups = list(ledger.unconsumed())
    finished = [g.group_id for g in groups if g.state is GroupState.finished]
    kept = [group for step in ledger.snapshot().kept for group in step.groups]
    kinds = ["admit", "publish", "release"]
    kinds += ["finish", "requeue", "reject"] * bool(groups)
    kinds += ["consume"] * bool(finished) + ["trained"] * bool(kept)
    newest = [step for step in ledger.snapshot().kept if step.step == ledger.version]
    is_untrained = newest and ledger.snapshot().untrained == {g.group_id for g in newest[0].groups}
    kinds += ["take back"] * bool(is_untrained) + ["go back"] * bool(earlier)
    group = draw(st.sampled_from(groups)) if groups else None
    match draw(st.sampled_from(kinds)):
        case "admit":
            index = ledger.num_prompts_taken
            ledger.admit(ledger.returned_prompt or PromptReference(0, index, 3), ledger.version)
        case "finish" if group:
            if group.state is GroupState.queued:
                ledger.start(group.group_id, f"rollout/{group.group_id % 2}")
            batch = batch_of(group.group_id, group.attempt, group.admitted_version)
            ledger.finish(group.group_id, group.attempt, batch, {"length": (2.0, 1)})
        case "requeue" if group:
            ledger.requeue(group.group_id, "worker lost")
        case "reject" if group:
            ledger.reject(group.group_id, "stale", returns_prompt=draw(st.booleans()))
        case "consume":
            number = draw(st.integers(1, len(finished)))
            ledger.consume(draw(st.permutations(finished))[:number], ledger.version)
        case "trained":
            trained = draw(st.lists(st.sampled_from(kept), min_size=1))
            ledger.record_trained([row for g in trained if g.batch for row in g.batch.rows])
        case "take back":
            ledger.take_back(ledger.version)
        case "publish":
            ledger.publish(ledger.version + 1)
        case "release":
            ledger.release(ledger.version - 1)
        case "go back":
            ledger.go_back(ledger.lineage + 1, draw(st.sampled_from(earlier)))


@given(st.data())
def test_replaying_any_part_of_a_history_gives_the_ledger_of_then(data: st.DataObject) -> None:
    ledger, packed, states = Ledger(), list[bytes](), list[LedgerState]()

    def note(record: Record) -> None:
        states.append(ledger.snapshot())
        packed.append(msgspec.msgpack.encode(record))

    ledger.journal = note
    for _ in range(data.draw(st.integers(0, 25))):
        a_change(ledger, data.draw, states)
    states.append(ledger.snapshot())
    records = [msgspec.msgpack.decode(record, type=Record) for record in packed]
    first = data.draw(st.integers(0, len(records)))
    again = Ledger.restore(states[first])
    for record, state in zip(records[first:], states[first:], strict=False):
        assert again.snapshot() == state
        replay(again, [record])
    assert again.snapshot() == states[-1]
    assert again.account() == ledger.account()


@given(st.data())
def test_what_came_after_the_state_that_a_ledger_goes_back_to_is_gone(data: st.DataObject) -> None:
    ledger = Ledger()
    for _ in range(data.draw(st.integers(0, 20))):
        a_change(ledger, data.draw)
    state, at_state = ledger.snapshot(), ledger.account()
    prompts = [group.prompt for group in sorted(waiting(state), key=lambda g: g.group_id)]
    for _ in range(data.draw(st.integers(0, 15))):
        a_change(ledger, data.draw)
    before = ledger.account()
    ledger.go_back(3, state)
    begun, account = ledger.snapshot(), ledger.account()
    assert (begun.lineage, begun.version) == (3, state.version)
    assert list(begun.returned_prompts) == [*prompts, *state.returned_prompts]
    assert begun.num_prompts_taken == state.num_prompts_taken
    assert (begun.unconsumed, begun.kept, begun.untrained) == ((), (), set())
    assert account["admitted"] == before["admitted"], "an id is never used again"
    assert account["consumed"] == at_state["consumed"] - len(prompts) + len(state.unconsumed)
    assert account["rows_trained"] == at_state["rows_trained"]
    assert account["rejected"].keys() - {WENT_BACK} == before["rejected"].keys()
    assert account["rejected"] == before["rejected"] | account["rejected"]
    num_given_up = before["admitted"] - sum(before["rejected"].values()) - account["consumed"]
    assert account["rejected"].get(WENT_BACK, 0) == num_given_up


def waiting(state: LedgerState) -> list[Group]:
    """The groups of a state that no published version was trained on."""
    consumed = [group for step in state.kept if step.step == state.version for group in step.groups]
    return [g for g in consumed if g.group_id in state.untrained] + list(state.unconsumed)


def test_a_lineage_that_goes_back_trains_the_same_prompts_as_other_groups() -> None:
    ledger = Ledger()
    prompts = [PromptReference(0, index, 3) for index in range(4)]
    for prompt in prompts[:2]:
        group = ledger.admit(prompt, 0)
        ledger.start(group.group_id, "rollout/0")
        ledger.finish(group.group_id, 0, batch_of(group.group_id))
    (first,) = ledger.consume([0], 0)
    ledger.record_trained(first.rows)
    ledger.publish(1)
    state = ledger.snapshot()
    (second,) = ledger.consume([1], 1)
    ledger.record_trained(second.rows)
    ledger.publish(2)
    ledger.admit(prompts[2], 2)
    ledger.start(2, "rollout/0")
    ledger.go_back(2, state)
    assert (ledger.lineage, ledger.version, ledger.num_prompts_taken) == (2, 1, 2)
    assert ledger.num_admitted_not_rejected == ledger.account()["consumed"] == 1
    assert ledger.account()["rejected"] == {WENT_BACK: 2}
    assert not ledger.finish(2, 0, batch_of(2)), "a late result of the lineage that was left"
    assert not ledger.needs_rows(0, 0), "no step of it is repeated"
    again = ledger.admit(prompts[1], 1)
    assert again.group_id == 3
    assert ledger.admit(prompts[2], 1).prompt == prompts[2], "the next of the dataset"
    ledger.start(3, "rollout/0")
    ledger.finish(3, 0, batch_of(3, admitted_version=1))
    ledger.record_trained(ledger.consume([3], 1)[0].rows)
    assert ledger.account()["rows_trained"] == 4
    assert ledger.account()["rows_trained_twice"] == 0, "once in this history"
    ledger.record_trained(second.rows)
    assert ledger.account()["rows_trained_twice"] == 2, "rows of the lineage that was left"
    with pytest.raises(LedgerError, match="lineage 1 follows lineage 2"):
        ledger.go_back(1, state)


def test_the_journal_comes_first_and_a_failing_one_changes_nothing() -> None:
    def full_disk(record: Record) -> None:
        raise OSError("no space left")

    for state, change in (
        (GroupState.queued, CHANGES["start"]),
        (GroupState.running, CHANGES["requeue"]),
        (GroupState.running, lambda ledger: ledger.finish(0, 0, batch_of(0))),
        (GroupState.running, CHANGES["reject"]),
        (GroupState.finished, CHANGES["consume"]),
        (GroupState.consumed, lambda ledger: ledger.record_trained(batch_of(0).rows)),
        (GroupState.consumed, lambda ledger: ledger.release(0)),
        (GroupState.consumed, lambda ledger: ledger.take_back(0)),
        (GroupState.consumed, lambda ledger: ledger.publish(1)),
        (GroupState.queued, lambda ledger: ledger.admit(PROMPT, 0)),
        (GroupState.queued, lambda ledger: ledger.go_back(1, LedgerState())),
    ):
        ledger = ledger_with_one(state)
        before = ledger.snapshot()
        ledger.journal = full_disk
        with pytest.raises(OSError, match="no space left"):
            change(ledger)
        assert ledger.snapshot() == before


def test_replay_refuses_records_that_do_not_follow() -> None:
    records: list[Record] = []
    ledger = Ledger()
    ledger.journal = records.append
    ledger.admit(PROMPT, 0)
    ledger.start(0, "rollout/0")
    ledger.finish(0, 0, batch_of(0))
    ledger.consume([0], 0)
    ledger.release(0)
    replay(Ledger(), records)
    for place, record in enumerate(records):
        with pytest.raises(LedgerError):
            replay(Ledger(), [*records[:place], record, *records[place:]])
    for place in range(len(records) - 1):
        with pytest.raises(LedgerError):
            replay(Ledger(), records[:place] + records[place + 1 :])


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
        ledger.release(group_id)
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
        ledger.release(group_id)
    assert len(msgspec.msgpack.encode(ledger.snapshot())) < 200
    account = ledger.account()
    assert (account["rows_trained"], account["rows_trained_twice"]) == (2 * 2700, 0)
