"""What ranks can begin from, and what they then have to repeat, after any order of events."""

from __future__ import annotations

import pytest

from areal_sc.controller.train.train_history import (
    MAX_UNCOVERED,
    MAX_UNUSED,
    Asked,
    StartingPoint,
    TrainHistory,
)
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.weights import ShardReference
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import (
    BEGIN_WRITE,
    COMPUTE,
    UPDATE,
    Compute,
    Demonstrations,
    SnapshotPlace,
    Update,
    Write,
)

INITIAL = StartingPoint(0, SnapshotPlace.initial)


def in_memory(version: int) -> StartingPoint:
    return StartingPoint(version, SnapshotPlace.memory)


def on_disk(version: int) -> StartingPoint:
    return StartingPoint(version, SnapshotPlace.disk)


def batch_of(*shard_ids: str) -> BatchMetadata:
    """A row of each shard."""
    shards = tuple(
        ShardMetadata("train/0", "tcp://a", shard_id, (RowRun(row, 0, 1),))
        for row, shard_id in enumerate(shard_ids)
    )
    rows = tuple(
        RowMetadata(
            group_id=row,
            attempt=0,
            sequence_length=3,
            reward=0.0,
            admitted_version=0,
            version_spans=((0, 1),),
            episode=0,
        )
        for row in range(len(shards))
    )
    return BatchMetadata("b", 0, (Columns({"proximal_logprobs": "float32"}, shards),), rows)


def computed(shard_id: str) -> Asked:
    return Asked(
        COMPUTE,
        [Compute(batch_of(), "logprobs", "proximal_logprobs")],
        [ShardReference("train/0", "tcp://a", shard_id)],
    )


def updated(version: int, number: int = 0, *shard_ids: str) -> Asked:
    operation = Operation(1, version, Kind.update, str(number))
    return Asked(UPDATE, [Update(operation, 0, (batch_of(*shard_ids),), advances=False)])


def history(*, memory: bool = True, max_steps: int = 0, num_versions: int = 0) -> TrainHistory:
    made = TrainHistory(has_memory_snapshots=memory, max_steps=max_steps)
    made.begin(1, INITIAL)
    train(made, num_versions)
    return made


def train(made: TrainHistory, num_versions: int) -> None:
    for _ in range(num_versions):
        made.note(updated(made.version))
        made.advance(made.version + 1)


def test_calls_stay_until_a_snapshot_in_memory_is_whole() -> None:
    made = history(num_versions=2)
    assert (made.sources, made.rows_from) == ([INITIAL], 0)
    assert [len(made.calls_at(version)) for version in range(3)] == [1, 1, 0]
    made.note_in_memory(2)
    assert (made.sources, made.rows_from) == ([in_memory(2)], 2)
    assert made.calls_at(1) == []


def test_calls_stay_until_a_snapshot_is_on_the_disk_as_far_as_they_may() -> None:
    made = history(max_steps=3, num_versions=3)
    made.note_in_memory(3)
    assert (made.sources, made.rows_from) == ([in_memory(3), INITIAL], 0)
    train(made, 1)  # too far for a repeat from the start
    assert (made.sources, made.rows_from) == ([in_memory(3)], 3)
    made.note_durable(3)
    made.note_durable(2)  # late news change nothing
    assert made.sources == [in_memory(3), on_disk(3)]
    assert made.rows_from == 3


def test_of_two_snapshots_in_memory_the_newest_stays_while_another_is_written() -> None:
    made = history(max_steps=5, num_versions=1)
    assert made.make_room_in_memory() == -1
    made.note_in_memory(1)
    train(made, 1)
    assert made.make_room_in_memory() == 1
    made.note_in_memory(2)
    assert made.sources == [in_memory(2), in_memory(1), INITIAL]
    assert made.make_room_in_memory() == 2
    assert made.sources == [in_memory(2), INITIAL]


@pytest.mark.parametrize("max_steps", [0, 2])
def test_without_snapshots_in_memory_a_few_steps_can_be_repeated(max_steps: int) -> None:
    made = history(memory=False, max_steps=max_steps, num_versions=max_steps)
    assert made.sources == [INITIAL]
    train(made, 1)
    assert made.sources == []
    assert made.rows_from == made.version


def test_updates_on_demonstrations_are_repeated_from_any_snapshot() -> None:
    made = history(memory=False)
    for _ in range(MAX_UNCOVERED):
        operation = Operation(1, made.version, Kind.update, "0")
        made.note(
            Asked(UPDATE, [Update(operation, 0, Demonstrations(0, (1, 2), (0, 1)), advances=True)])
        )
        made.advance(made.version + 1)
    assert made.sources == [INITIAL]
    assert all(len(made.calls_at(version)) == 1 for version in range(MAX_UNCOVERED))
    made.note_durable(MAX_UNCOVERED - 1)
    assert made.sources == [on_disk(MAX_UNCOVERED - 1)]
    assert made.calls_at(0) == []


def test_what_no_snapshot_covers_does_not_pile_up() -> None:
    made = history(num_versions=MAX_UNCOVERED)
    assert made.rows_from == 0
    train(made, 1)
    assert made.rows_from == made.version
    assert made.calls_at(0) == []


def test_a_snapshot_that_cannot_be_read_is_no_source() -> None:
    made = history(max_steps=9, num_versions=1)
    made.note_in_memory(1)
    made.note_durable(1)
    made.note_unreadable(in_memory(1))
    assert made.sources == [on_disk(1)]
    made.note_unreadable(on_disk(1))
    assert made.sources == []


def test_an_update_is_noted_once_and_dropped_if_it_failed() -> None:
    made = history()
    first, again, failed = updated(0), updated(0), updated(0, 1)
    for update in (first, again, failed):
        made.note(update)
    assert made.calls_at(0) == [first, failed]
    made.drop(0, again)
    made.drop(0, failed)
    assert made.calls_at(0) == [first]


def test_logprobs_that_no_update_used_are_repeated_only_if_they_are_new() -> None:
    made = history()
    used = computed("life0.0")
    made.note(used)
    made.note(updated(0, 0, "life0.0"))
    unused = [computed(f"life0.{n}") for n in range(1, MAX_UNUSED + 2)]
    for call in unused:
        made.note(call)
    kept = [call for call in made.calls_at(0) if call.method is COMPUTE]
    assert kept == [used, *unused[1:]]


def test_a_batch_names_the_shards_of_the_newest_lives() -> None:
    made = history()
    batch = batch_of("life0.1", "life0.2")
    assert made.current(batch) is batch
    for life in ("life1", "life2"):
        made.move("life0.1", ShardReference("train/0", "tcp://b", f"{life}.7"))
    moved, stays = made.current(batch).shards
    assert (moved.shard_id, moved.node_addr, moved.runs) == (
        "life2.7",
        "tcp://b",
        (RowRun(0, 0, 1),),
    )
    assert stays == batch.shards[1]
    made.advance(1)
    assert made.current(batch) is batch


def test_what_is_being_written_is_known_until_it_is_written() -> None:
    made = history()
    write = Asked(BEGIN_WRITE, [Write(Operation(1, 0, Kind.snapshot))])
    made.note(write)
    train(made, 2)
    made.note_in_memory(2)  # the call itself is forgotten
    assert made.is_writing
    made.drop(0, write)
    assert not made.is_writing


def test_another_lineage_begins_with_nothing() -> None:
    made = history(max_steps=9, num_versions=2)
    made.note_in_memory(2)
    made.begin(2, on_disk(1))
    assert (made.lineage, made.version, made.sources) == (2, 1, [on_disk(1)])
    assert made.calls_at(1) == []
