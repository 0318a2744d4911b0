"""Batches of random layout, for tests of what is done with metadata."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata

Cell = tuple[str, str, int]  # (owner, shard, row of the shard)


def table(batch: BatchMetadata) -> dict[str, list[Cell]]:
    """Where each field of each row lies: the meaning of a batch, read row by row."""
    columns: dict[str, list[Cell]] = {}
    for name in batch.fields:
        cells: dict[int, Cell] = {}
        (holding,) = [c for c in batch.columns if name in c.dtypes]
        for shard in holding.shards:
            for offset, first, num_rows in shard.runs:
                for i in range(num_rows):
                    assert offset + i not in cells
                    cells[offset + i] = (shard.node_id, shard.shard_id, first + i)
        columns[name] = [cells[row] for row in range(batch.total_batch_size)]
    return columns


def columns_of(
    sizes: Sequence[int], owner: str, fields: Sequence[str], prefix: str = "life"
) -> tuple[Columns, ...]:
    """Columns whose shards have so many rows each."""
    shards = []
    offset = 0
    for i, size in enumerate(sizes):
        shards.append(
            ShardMetadata(
                node_id=f"{owner}/{i % 3}",
                node_addr=f"tcp://127.0.0.1:{5000 + i % 3}",
                shard_id=f"{prefix}.{i}",
                runs=(RowRun(offset, 0, size),),
            )
        )
        offset += size
    return (Columns(dict.fromkeys(fields, "float32"), tuple(shards)),) if shards else ()


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
            episode=rng.randrange(3),
            advantage=rng.choice([None, rng.uniform(-2, 2)]),
        )
        for _ in range(num_rows)
    )
    columns = columns_of(sizes, "rollout", ["input_ids", "loss_mask"])
    min_token_version = draw(st.none() | st.integers(0, 9))
    return BatchMetadata("b", 3, columns, rows, min_token_version)


@st.composite
def rows_of(draw: st.DrawFn, batch: BatchMetadata) -> list[int]:
    """Some of its rows, in any order."""
    order = list(range(batch.total_batch_size))
    random.Random(draw(st.integers(0, 1000))).shuffle(order)
    return order[: draw(st.integers(0, len(order)))]
