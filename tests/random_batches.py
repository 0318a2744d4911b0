"""Batches of random layout, for tests of what is done with metadata."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from areal_sc.metadata import BatchMetadata, RowMetadata, ShardMetadata, TensorMetadata

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
