"""The form in which the metadata of a batch travels and is kept: compact, msgpack-able lists.

Rows go by columns; pieces of one shard share its header, and shards of one worker its address. So
a row costs some 20 to 40 bytes, whatever the length of prompt and answer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from areal_sc.errors import MetadataError
from areal_sc.metadata import BatchMetadata, RowMetadata, ShardMetadata, TensorMetadata

Wire = list[Any]
"""Positional lists."""


def batch_to_wire(batch: BatchMetadata) -> Wire:
    """Compact msgpack-able form; `batch_from_wire` is its inverse."""
    return [
        batch.batch_id,
        batch.global_step,
        [
            [row.group_id for row in batch.rows],
            [row.attempt for row in batch.rows],
            [row.sequence_length for row in batch.rows],
            [row.reward for row in batch.rows],
            [row.admitted_version for row in batch.rows],
            [list(itertools.chain.from_iterable(row.version_spans)) for row in batch.rows],
            [row.advantage for row in batch.rows],
        ],
        _shards_to_wire(batch.shards),
        batch.min_token_version,
    ]


def batch_from_wire(wire: Wire) -> BatchMetadata:
    """Inverse of `batch_to_wire`.

    Raises: MetadataError: the list does not have the form that `batch_to_wire` gives.
    """
    try:
        batch_id, global_step, columns, shards, min_token_version = wire
        rows = tuple(
            RowMetadata(
                int(group_id),
                int(attempt),
                int(length),
                float(reward),
                int(admitted),
                tuple((int(v), int(n)) for v, n in zip(spans[::2], spans[1::2], strict=True)),
                None if advantage is None else float(advantage),
            )
            for group_id, attempt, length, reward, admitted, spans, advantage in zip(
                *columns, strict=True
            )
        )
        return BatchMetadata(
            str(batch_id),
            int(global_step),
            len(rows),
            tuple(_shards_from_wire(shards, len(rows))),
            rows,
            None if min_token_version is None else int(min_token_version),
        )
    except (TypeError, ValueError, KeyError, IndexError) as error:
        if isinstance(error, MetadataError):
            raise
        raise MetadataError(f"not the wire form of a batch: {error!r}") from error


def _shards_to_wire(shards: Iterable[ShardMetadata]) -> Wire:
    """Pieces of one shard share its header; consecutive rows are sent as (first, count)."""
    owners: dict[tuple[str, str], dict[tuple[Any, ...], list[Any]]] = {}
    for shard in shards:
        fields = tuple((name, *_tensor_key(t)) for name, t in shard.fields.items())
        pieces = owners.setdefault((shard.node_id, shard.node_addr), {}).setdefault(
            (shard.shard_id, fields), []
        )
        rows = shard.shard_rows
        first = rows[0] if rows else 0
        if rows == tuple(range(first, first + len(rows))):
            pieces.append([shard.offset, first, len(rows)])
        else:
            pieces.append([shard.offset, list(rows)])
    return [
        [
            node_id,
            node_addr,
            [
                [shard_id, [[n, list(s), dtype, dev] for n, s, dtype, dev in fields], pieces]
                for (shard_id, fields), pieces in held.items()
            ],
        ]
        for (node_id, node_addr), held in owners.items()
    ]


def _tensor_key(tensor: TensorMetadata) -> tuple[tuple[int, ...], str, str]:
    return tensor.shape, tensor.dtype, tensor.device


def _shards_from_wire(wire: Wire, num_rows: int) -> Iterable[ShardMetadata]:
    for node_id, node_addr, held in wire:
        for shard_id, fields, pieces in held:
            tensors = {
                str(name): TensorMetadata(tuple(int(n) for n in shape), str(dtype), str(device))
                for name, shape, dtype, device in fields
            }
            for piece in pieces:
                if len(piece) == 3:
                    offset, first, count = piece
                    if not 0 <= count <= num_rows:
                        raise ValueError(f"a piece of {count} rows in a batch of {num_rows}")
                    rows: tuple[int, ...] = tuple(range(first, first + count))
                else:
                    offset, listed = piece
                    rows = tuple(int(row) for row in listed)
                yield ShardMetadata(
                    str(node_id),
                    str(node_addr),
                    str(shard_id),
                    len(rows),
                    int(offset),
                    tensors,
                    rows,
                )
