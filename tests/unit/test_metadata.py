from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.errors import MetadataError
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
    concat,
)

Cell = tuple[str, str, int]  # (owner, shard, row of the shard)


def table(batch: BatchMetadata) -> dict[str, list[Cell]]:
    """Where each field of each row lies: the meaning of a batch, read row by row."""
    columns: dict[str, list[Cell]] = {}
    for name in batch.fields:
        cells: dict[int, Cell] = {}
        for shard in batch.shards:
            if name in shard.fields:
                for i, shard_row in enumerate(shard.shard_rows):
                    assert shard.offset + i not in cells
                    cells[shard.offset + i] = (shard.node_id, shard.shard_id, shard_row)
        columns[name] = [cells[row] for row in range(batch.total_batch_size)]
    return columns


def shards_of(
    sizes: Sequence[int], owner: str, fields: Sequence[str], prefix: str = "life"
) -> tuple[ShardMetadata, ...]:
    shards = []
    offset = 0
    for i, size in enumerate(sizes):
        shards.append(
            ShardMetadata(
                node_id=f"{owner}/{i % 3}",
                node_addr=f"tcp://127.0.0.1:{5000 + i % 3}",
                shard_id=f"{prefix}.{i}",
                batch_size=size,
                offset=offset,
                fields={name: TensorMetadata((size * 10,), "float32") for name in fields},
                shard_rows=tuple(range(size)),
            )
        )
        offset += size
    return tuple(shards)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0) -> BatchMetadata:
    sizes = draw(st.lists(st.integers(1, 5), min_size=min_rows, max_size=6))
    num_rows = sum(sizes)
    # numbers by seed: what is worth shrinking is the layout of rows and shards
    rng = random.Random(draw(st.integers(0, 1000)))
    rows = tuple(
        RowMetadata(
            group_id=rng.randrange(4),
            attempt=rng.randrange(3),
            sequence_length=rng.choice([0, 1, rng.randrange(2000)]),
            reward=rng.uniform(-2, 2),
            admitted_version=rng.randrange(10),
            version_spans=tuple((v, rng.randrange(500)) for v in range(rng.randrange(4))),
            advantage=rng.choice([None, rng.uniform(-2, 2)]),
        )
        for _ in range(num_rows)
    )
    shards = shards_of(sizes, "rollout", ["input_ids", "loss_mask"])
    min_token_version = draw(st.none() | st.integers(0, 9))
    return BatchMetadata("b", 3, num_rows, shards, rows, min_token_version)


@st.composite
def rows_of(draw: st.DrawFn, batch: BatchMetadata) -> list[int]:
    """Some of its rows, in any order."""
    order = list(range(batch.total_batch_size))
    random.Random(draw(st.integers(0, 1000))).shuffle(order)
    return order[: draw(st.integers(0, len(order)))]


@given(batches(), st.data())
def test_take_moves_rows_with_all_their_cells(batch: BatchMetadata, data: st.DataObject) -> None:
    rows = data.draw(rows_of(batch))
    taken = batch.take(rows)
    assert taken.total_batch_size == len(rows)
    assert taken.rows == tuple(batch.rows[row] for row in rows)
    before = table(batch)
    expected = {name: [cells[row] for row in rows] for name, cells in before.items()}
    assert table(taken) == (expected if rows else {})
    again = data.draw(rows_of(taken))
    directly = batch.take([rows[row] for row in again])
    assert table(taken.take(again)) == table(directly)
    assert taken.take(again).rows == directly.rows


@given(batches())
def test_taking_every_row_in_order_changes_nothing(batch: BatchMetadata) -> None:
    assert batch.take(range(batch.total_batch_size)) == batch


@given(st.lists(batches(), min_size=1, max_size=4))
def test_concat_puts_the_tables_one_below_the_other(parts: list[BatchMetadata]) -> None:
    whole = concat(parts, batch_id="whole", global_step=7, min_token_version=2)
    assert (whole.batch_id, whole.global_step, whole.min_token_version) == ("whole", 7, 2)
    assert whole.rows == tuple(row for part in parts for row in part.rows)
    for name in whole.fields:
        assert table(whole)[name] == [c for p in parts for c in table(p).get(name, [])]
    filled = [part for part in parts if part.total_batch_size]
    assert set(whole.fields) == {name for part in filled for name in part.fields}


@given(batches(min_rows=1), st.data())
def test_union_joins_the_columns_of_equal_rows(batch: BatchMetadata, data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, batch.total_batch_size))
    sizes = [size for size in (cut, batch.total_batch_size - cut) if size]
    other = replace(batch, shards=shards_of(sizes, "train", ["proximal_logprobs"], "other"))
    order = data.draw(rows_of(batch))
    united = batch.union(other)
    assert table(united) == table(batch) | table(other)
    assert united.rows == batch.rows
    # columns stay together whatever is done to the rows afterwards
    assert table(united.take(order)) == table(batch.take(order)) | table(other.take(order))
    assert table(united.select(batch.fields)) == table(batch)
    with pytest.raises(MetadataError, match="both hold"):
        united.union(other)


@given(batches(), st.integers(1, 6), st.sampled_from(["tokens", "rows"]))
def test_split_gives_every_row_to_one_part(batch: BatchMetadata, n: int, balance: Any) -> None:
    parts = batch.partition(n, balance)
    assert len(parts) == n
    assert sorted(row for part in parts for row in part) == list(range(batch.total_batch_size))
    assert all(part == sorted(part) for part in parts)
    assert batch.split(n, balance) == [batch.take(part) for part in parts]
    if balance == "rows":
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert [row for part in parts for row in part] == list(range(batch.total_batch_size))
    else:
        loads = [sum(batch.sequence_lengths[row] for row in part) for part in parts]
        assert max(loads) - min(loads) <= max(batch.sequence_lengths, default=0)


def test_parts_of_equal_tokens_are_filled_evenly() -> None:
    rows = tuple(RowMetadata(i, 0, 0, 0.0, 0, ()) for i in range(6))
    batch = BatchMetadata("b", 0, 6, (), rows)
    assert sorted(map(len, batch.partition(3))) == [2, 2, 2]


@given(batches(), st.data())
def test_the_wire_form_comes_back_as_it_was(batch: BatchMetadata, data: st.DataObject) -> None:
    order = data.draw(rows_of(batch))
    for sent in (batch, batch.take(order)):
        wire = msgpack.unpackb(msgpack.packb(sent.to_wire()))
        arrived = BatchMetadata.from_wire(wire)
        assert arrived.rows == sent.rows
        assert table(arrived) == table(sent)
        assert replace(arrived, shards=()) == replace(sent, shards=())
        by_place = {(s.offset, s.shard_id): s for s in arrived.shards}
        assert by_place == {(s.offset, s.shard_id): s for s in sent.shards}


@given(batches(min_rows=1), st.data())
def test_a_damaged_wire_form_raises_metadata_errors_only(
    batch: BatchMetadata, data: st.DataObject
) -> None:
    packed = bytearray(msgpack.packb(batch.to_wire()))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    try:
        arrived = BatchMetadata.from_wire(wire)
    except MetadataError:
        return
    assert isinstance(arrived, BatchMetadata)


def training_batch(num_groups: int, sequence_length: int) -> BatchMetadata:
    """As a trainer gets it: groups of 8 from 4 owners, interrupted twice, advantages computed."""
    rng = random.Random(0)
    groups = []
    for group in range(num_groups):
        rows = tuple(
            RowMetadata(
                group_id=10_000 + group,
                attempt=1,
                sequence_length=sequence_length,
                reward=rng.random(),
                admitted_version=250,
                version_spans=tuple((250 + v, sequence_length // 3) for v in range(3)),
            )
            for _ in range(8)
        )
        shard = ShardMetadata(
            node_id=f"rollout/{group % 4}",
            node_addr=f"tcp://127.0.0.1:{40_000 + group % 4}",
            shard_id=f"3f9a1c22be07.{900 + group}",
            batch_size=8,
            offset=0,
            fields={
                name: TensorMetadata((8 * sequence_length,), dtype)
                for name, dtype in TRAJECTORY_FIELDS.items()
            },
            shard_rows=tuple(range(8)),
        )
        groups.append(BatchMetadata(f"g{group}", 0, 8, (shard,), rows))
    batch = concat(groups, batch_id="step-251", global_step=251)
    return batch.with_advantages([rng.uniform(-2, 2) for _ in batch.rows])


@pytest.mark.parametrize("sequence_length", [100, 128_000])
@pytest.mark.parametrize("num_groups", [2, 64])
def test_a_row_takes_less_than_150_bytes_on_the_wire(num_groups: int, sequence_length: int) -> None:
    batch = training_batch(num_groups, sequence_length)
    for sent in (batch, *batch.split(2)):
        size = len(msgpack.packb(sent.to_wire()))
        assert size < 150 * sent.total_batch_size


def row(**changes: Any) -> RowMetadata:
    return replace(RowMetadata(1, 0, 10, 0.5, 3, ((3, 4), (5, 2))), **changes)


def small_batch() -> BatchMetadata:
    rows = tuple(row(group_id=i // 2) for i in range(4))
    return BatchMetadata("b", 0, 4, shards_of([3, 1], "rollout", ["input_ids"]), rows)


def test_trained_tokens_are_counted_by_version() -> None:
    assert row().num_loss_tokens == 6
    assert [row().num_loss_tokens_since(v) for v in (3, 4, 5, 6)] == [6, 2, 2, 0]
    batch = small_batch()
    assert (batch.num_tokens, batch.group_ids) == (40, (0, 1))


def test_select_keeps_only_the_named_fields() -> None:
    batch = small_batch()
    other = replace(batch, shards=shards_of([4], "train", ["advantages"], "x"))
    assert batch.union(other).select(["advantages"]).shards == other.shards


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (lambda b: b.select(["absent"]), r"has fields \['input_ids'\], not \['absent'\]"),
        (lambda b: b.take([0, 4]), r"rows 0\.\.3, not 4"),
        (lambda b: b.take([-1]), r"rows 0\.\.3, not -1"),
        (lambda b: b.take([1, 1]), "named twice"),
        (lambda b: b.union(b.take([0])), r"has 4 rows, batch b has 1"),
        (lambda b: b.union(b.take([2, 0, 1, 3])), r"row 0 is \(0, 0, 10\).* but \(1, 0, 10\)"),
        (lambda b: b.with_advantages([1.0]), "has 4 rows, got 1 advantages"),
        (lambda b: b.partition(0), "into 0 parts"),
        (lambda b: concat([], batch_id="c", global_step=0), "got 0"),
        (
            lambda b: concat([b, replace(b, shards=())], batch_id="c", global_step=0),
            r"fields \['input_ids'\], batch b has \[\]",
        ),
        (lambda b: replace(b, total_batch_size=5), "is 5, but there is metadata of 4 rows"),
        (lambda b: replace(b, shards=b.shards[:1]), "shards hold 3 rows, the batch has 4"),
        (lambda b: replace(b, shards=b.shards[1:]), "expected a shard at row 0, got one at row 3"),
        (lambda b: replace(b.shards[0], shard_rows=(0,)), "batch_size is 3, but .* 1 rows"),
        (lambda b: BatchMetadata.from_wire([]), "not the wire form"),
    ],
)
def test_operations_that_do_not_fit_name_both_values(
    operation: Callable[[BatchMetadata], Any], message: str
) -> None:
    with pytest.raises(MetadataError, match=message):
        operation(small_batch())
