"""Metadata as it travels."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_batches import batches, rows_of

from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata, concat
from areal_sc.token_fields import TRAJECTORY_FIELDS
from areal_sc.weights.published import (
    BucketLayout,
    ShardReference,
    WeightBroadcast,
    WeightsReference,
)

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(BatchMetadata).decode


@given(batches(), st.data())
def test_a_batch_comes_back_as_it_was(batch: BatchMetadata, data: st.DataObject) -> None:
    order = data.draw(rows_of(batch))
    for sent in (batch, batch.take(order)):
        assert decode(encode(sent)) == sent


@given(batches(min_rows=1), st.data())
def test_a_damaged_batch_is_refused_or_one_that_fits_together(
    batch: BatchMetadata, data: st.DataObject
) -> None:
    packed = bytearray(encode(batch))
    packed[data.draw(st.integers(0, len(packed) - 1))] = data.draw(st.integers(0, 255))
    try:
        arrived = decode(packed)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return
    for columns in arrived.columns:
        runs = sorted(run for shard in columns.shards for run in shard.runs)
        rows = [run.offset + i for run in runs for i in range(run.num_rows)]
        assert rows == list(range(arrived.total_batch_size))


def test_a_run_that_claims_many_rows_is_refused_before_they_are_listed() -> None:
    row = RowMetadata(1, 0, 9, 1.0, 0, (), 0)
    shard = ShardMetadata("rollout/0", "tcp://127.0.0.1:5000", "life.1", (RowRun(0, 0, 1),))
    batch = BatchMetadata("b", 0, (Columns({"input_ids": "int32"}, (shard,)),), (row,))
    packed = msgspec.msgpack.decode(encode(batch))
    packed[2][0][1][0][3][0][2] = 1 << 60
    with pytest.raises(msgspec.ValidationError, match=r"shards hold 1152921504606846976 rows"):
        decode(encode(packed))


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
                episode=episode,
            )
            for episode in range(8)
        )
        shard = ShardMetadata(
            node_id=f"rollout/{group % 4}",
            node_addr=f"tcp://127.0.0.1:{40_000 + group % 4}",
            shard_id=f"3f9a1c22be07.{900 + group}",
            runs=(RowRun(0, 0, 8),),
        )
        columns = Columns(dict(TRAJECTORY_FIELDS), (shard,))
        groups.append(BatchMetadata(f"g{group}", 0, (columns,), rows))
    batch = concat(groups, batch_id="step-251", global_step=251)
    return batch.with_advantages([rng.uniform(-2, 2) for _ in batch.rows])


@pytest.mark.parametrize("sequence_length", [100, 128_000])
@pytest.mark.parametrize("num_groups", [2, 64])
def test_a_row_takes_less_than_100_bytes_on_the_wire(num_groups: int, sequence_length: int) -> None:
    batch = training_batch(num_groups, sequence_length)
    for sent in (batch, *batch.split(2)):
        assert len(encode(sent)) < 100 * sent.total_batch_size


def test_weights_come_back_as_they_were() -> None:
    rank = ShardReference("train/0", "tcp://127.0.0.1:5000", "life.3")
    layout = BucketLayout(("a", "b"), ("float32", "bfloat16"), ((2, 3), ()))
    weights = WeightsReference(7, (rank,), broadcast=WeightBroadcast("g", rank, (layout,)))
    assert msgspec.msgpack.decode(encode(weights), type=WeightsReference) == weights
    with pytest.raises(msgspec.ValidationError, match="2 names, 1 dtypes and 0 shapes"):
        msgspec.msgpack.decode(encode([["a", "b"], ["float32"], []]), type=BucketLayout)
