"""What ranks can begin from, and what they then have to repeat, after any order of events."""

from __future__ import annotations

from areal_sc.controller.train.rank_state import MAX_UNUSED, Asked, RankState, StartingPoint
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.weights.published import ShardReference
from areal_sc.workers.operations import Kind, Operation
from areal_sc.workers.rank_methods import (
    BEGIN_WRITE,
    COMPUTE,
    UPDATE,
    Compute,
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


def at_version(version: int) -> RankState:
    made = RankState()
    made.begin(1, INITIAL)
    train(made, version)
    return made


def train(made: RankState, num_versions: int) -> None:
    """Without snapshots."""
    for _ in range(num_versions):
        made.note(updated(made.version))
        made.advance(made.version + 1)


def test_ranks_begin_from_a_snapshot_of_their_version_alone() -> None:
    made = at_version(0)
    assert made.sources == [INITIAL]
    made.note(updated(0))
    made.note_in_memory(1)
    assert made.sources == [INITIAL], "the step is not complete"
    made.advance(1)
    assert (made.sources, made.calls) == ([in_memory(1)], [])
    made.note_durable(1)
    assert made.sources == [in_memory(1), on_disk(1)]
    train(made, 1)
    assert made.sources == [], "the snapshots of version 1 are of no use"
    made.note_durable(1)
    assert made.sources == []


def test_the_snapshot_of_the_step_stays_while_the_next_one_is_taken() -> None:
    made = at_version(1)
    assert made.kept_version == -1
    made.note_in_memory(1)
    made.note_in_memory(2)
    assert made.kept_version == 1
    made.advance(2)
    assert made.kept_version == 2
    made.drop_memory_snapshots()
    assert (made.kept_version, made.sources) == (-1, [])


def test_a_snapshot_that_cannot_be_read_is_no_source() -> None:
    made = at_version(1)
    made.note_in_memory(1)
    made.note_durable(1)
    made.note_unreadable(in_memory(1))
    assert made.sources == [on_disk(1)]
    made.note_unreadable(on_disk(1))
    assert made.sources == []


def test_a_later_start_begins_from_what_the_ranks_hold_of_its_version() -> None:
    made = RankState()
    made.take_over(3, 5, [4, 5, 6], is_initial=False)
    assert (made.lineage, made.version, made.sources) == (3, 5, [in_memory(5)])
    made.take_over(3, 5, [4], is_initial=False)
    assert made.sources == []
    made.take_over(3, 0, [], is_initial=True)
    assert made.sources == [INITIAL]


def test_an_update_is_noted_once_and_dropped_if_it_failed() -> None:
    made = at_version(0)
    first, again, failed = updated(0), updated(0), updated(0, 1)
    for update in (first, again, failed):
        made.note(update)
    assert made.calls == [first, failed]
    made.drop(again)
    made.drop(failed)
    assert made.calls == [first]


def test_logprobs_that_no_update_used_are_repeated_only_if_they_are_new() -> None:
    made = at_version(0)
    used = computed("life0.0")
    made.note(used)
    made.note(updated(0, 0, "life0.0"))
    unused = [computed(f"life0.{n}") for n in range(1, MAX_UNUSED + 2)]
    for call in unused:
        made.note(call)
    kept = [call for call in made.calls if call.method is COMPUTE]
    assert kept == [used, *unused[1:]]


def test_of_a_step_whose_rows_are_gone_only_writes_are_repeated() -> None:
    made = at_version(0)
    write = Asked(BEGIN_WRITE, [Write(Operation(1, 0, Kind.snapshot), "call")])
    for call in (write, computed("life0.0"), updated(0)):
        made.note(call)
    assert made.is_updating
    made.drop_step()
    assert (made.calls, made.is_updating) == ([write], False)


def test_a_batch_names_the_shards_of_the_newest_lives() -> None:
    made = at_version(0)
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


def test_another_lineage_begins_with_nothing() -> None:
    made = at_version(2)
    made.note_in_memory(2)
    made.note(updated(2))
    made.begin(2, on_disk(1))
    assert (made.lineage, made.version, made.sources) == (2, 1, [on_disk(1)])
    assert made.calls == []
