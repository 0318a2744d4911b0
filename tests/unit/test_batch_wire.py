from __future__ import annotations

import random
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_batches import batches, rows_of, table

from areal_sc.batch_wire import batch_from_wire, batch_to_wire
from areal_sc.errors import MetadataError
from areal_sc.metadata import (
    TRAJECTORY_FIELDS,
    BatchMetadata,
    RowMetadata,
    ShardMetadata,
    TensorMetadata,
    concat,
)


@given(batches(), st.data())
def test_the_wire_form_comes_back_as_it_was(batch: BatchMetadata, data: st.DataObject) -> None:
    order = data.draw(rows_of(batch))
    for sent in (batch, batch.take(order)):
        wire = msgpack.unpackb(msgpack.packb(batch_to_wire(sent)))
        arrived = batch_from_wire(wire)
        assert arrived.rows == sent.rows
        assert table(arrived) == table(sent)
        assert replace(arrived, shards=()) == replace(sent, shards=())
        by_place = {(s.offset, s.shard_id): s for s in arrived.shards}
        assert by_place == {(s.offset, s.shard_id): s for s in sent.shards}


@given(batches(min_rows=1), st.data())
def test_a_damaged_wire_form_raises_metadata_errors_only(
    batch: BatchMetadata, data: st.DataObject
) -> None:
    packed = bytearray(msgpack.packb(batch_to_wire(batch)))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        wire = msgpack.unpackb(packed, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException):
        return
    try:
        arrived = batch_from_wire(wire)
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
        size = len(msgpack.packb(batch_to_wire(sent)))
        assert size < 150 * sent.total_batch_size


def test_another_list_is_refused() -> None:
    with pytest.raises(MetadataError, match="not the wire form"):
        batch_from_wire([])
