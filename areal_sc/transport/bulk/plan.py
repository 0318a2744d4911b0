"""Which bytes a pull asks for, where they lie, and where they go: arithmetic without I/O.

slices      of a batch: rows of one shard, of all fields that the shard has
transfers   slices with their destinations; requests are made of smaller ones
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.metadata import BatchMetadata, RowRun, ShardMetadata
from areal_sc.token_fields import FieldType, field_type
from areal_sc.transport.bulk.messages import MAX_REQUEST_FIELDS, MAX_REQUEST_ROWS, ShardSlice
from areal_sc.transport.bulk.session import ShardOwner
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.shards.layout import SealedField, ShardLayout
from areal_sc.transport.tensor_bytes import type_named


class OwnedSlice(NamedTuple):
    """Rows of a shard that lie together in what is pulled.

    Attributes:
        offset: values of each of its tensors that come before.
    """

    owner: ShardOwner
    rows: ShardSlice
    offset: int = 0


class Transfer(NamedTuple):
    """A slice, and memory of its size where it goes, one part after the other."""

    rows: ShardSlice
    destinations: Sequence[memoryview]


def shard_slice(
    shard_id: str, fields: Mapping[str, str], rows: Sequence[int], lengths: tuple[int, ...]
) -> ShardSlice:
    """Whole rows."""
    itemsizes = sum(type_named(it).itemsize for it in fields.values())
    return ShardSlice(shard_id, dict(fields), list(rows), lengths, 0, sum(lengths) * itemsizes)


RowLengths = Mapping[tuple[str, str], Mapping[str, Sequence[int]]]
"""(name of the owner, shard) -> field -> values in each of its rows."""

Spans = dict[str, tuple[tuple[int, int], ...]]
"""Field of rows -> (start, stop) of each row's values in what is pulled."""


def owner_of(shard: ShardMetadata) -> ShardOwner:
    """Who has a shard."""
    return ShardOwner(shard.node_id, shard.node_addr, parse_shard_id(shard.shard_id)[0])


def slices_of(batch: BatchMetadata, held: RowLengths) -> tuple[list[OwnedSlice], Spans]:
    """Where the rows of a batch lie, and where the values of its fields of rows come to lie.

    Args:
        held: of the shards with fields whose values have lengths of their own.
    Raises: ProtocolError: a shard has no such row.
    """
    lengths = tuple(batch.sequence_lengths)
    starts = tuple(accumulate(lengths, initial=0))
    slices, spans = list[OwnedSlice](), Spans()
    for columns in batch.columns:
        types = {name: field_type(it) for name, it in columns.dtypes.items()}
        of_tokens = {name: it.type_name for name, it in types.items() if it.per == "token"}
        for shard in columns.shards if of_tokens else ():
            for offset, its_rows in _stretches(shard.runs):
                its_lengths = lengths[offset : offset + len(its_rows)]
                wanted = shard_slice(shard.shard_id, of_tokens, its_rows, its_lengths)
                slices.append(OwnedSlice(owner_of(shard), wanted, starts[offset]))
        for name in (it for it in types if it not in of_tokens):
            found, spans[name] = _slices_of_rows(columns.shards, name, types[name], held)
            slices += found
    return slices, spans


def _slices_of_rows(
    shards: Iterable[ShardMetadata], name: str, of: FieldType, held: RowLengths
) -> tuple[list[OwnedSlice], tuple[tuple[int, int], ...]]:
    """The same of one field of rows, or of groups: what rows share is asked for once."""
    slices, spans = list[OwnedSlice](), list[tuple[int, int]]()
    places: dict[tuple[tuple[str, str], int], tuple[int, int]] = {}
    position = 0
    runs = [(run, shard) for shard in shards for run in shard.runs]
    for (_, first, count), shard in sorted(runs, key=lambda it: it[0]):
        key = shard.node_id, shard.shard_id
        rows = [first] * count if of.per == "group" else list(range(first, first + count))
        new = [row for row in dict.fromkeys(rows) if (key, row) not in places]
        sizes = [1] * len(new)
        if of.has_own_length:
            of_shard = held[key].get(name, ())
            if new and new[-1] >= len(of_shard):
                raise ProtocolError(
                    f"shard {shard.shard_id} on {shard.node_id}, field {name!r:.200}: expected row "
                    f"{new[-1]}, got {len(of_shard)} rows"
                )
            sizes = [of_shard[row] for row in new]
        if new:
            wanted = shard_slice(shard.shard_id, {name: of.type_name}, new, tuple(sizes))
            slices.append(OwnedSlice(owner_of(shard), wanted, position))
        for row, size in zip(new, sizes, strict=True):
            places[key, row] = position, position + size
            position += size
        spans += [places[key, row] for row in rows]
    return slices, tuple(spans)


def copy_layout(ranks: Iterable[Mapping[str, OwnedSlice]]) -> ShardLayout:
    """The layout of a copy of the parameters that these ranks hold parts of, one row each.

    Raises: ProtocolError: the parts of a parameter have different dtypes.
    """
    numel: Counter[str] = Counter()
    dtypes: dict[str, str] = {}
    for rank in ranks:
        for name, (_, rows, _) in rank.items():
            numel[name] += sum(rows.lengths)
            dtype = rows.fields[name]
            if dtypes.setdefault(name, dtype) != dtype:
                raise ProtocolError(f"parts of {name!r} are of {dtypes[name]} and of {dtype}")
    tensors = {
        name: torch.empty(numel[name], dtype=type_named(dtype).dtype, device="meta")
        for name, dtype in dtypes.items()
    }
    return ShardLayout.of(tensors, {name: [numel[name]] for name in tensors}, is_copy=True)


def transfers_to(
    ranks: Iterable[Mapping[str, OwnedSlice]], layout: ShardLayout, memory: memoryview
) -> dict[ShardOwner, list[Transfer]]:
    """What fills the memory of such a copy, the parts of each parameter in the order of ranks."""
    starts = {name: field.start for name, field in layout.fields.items()}
    transfers: dict[ShardOwner, list[Transfer]] = {}
    for rank in ranks:
        for name, (owner, rows, _) in rank.items():
            end = starts[name] + rows.num_bytes
            part = memory[starts[name] : end]
            starts[name] = end
            transfers.setdefault(owner, []).append(Transfer(rows, [part]))
    return transfers


def first_of_run(rows: Sequence[int]) -> int | None:
    """The first row, where the others follow it in the shard."""
    if not rows:
        return None
    first: int = rows[0]
    return first if rows == list(range(first, first + len(rows))) else None


def find_bytes(
    held: Mapping[str, SealedField], wanted: ShardSlice, node_id: str
) -> list[list[memoryview]]:
    """The rows where they lie in the shard, field by field; nothing is skipped.

    Raises:
        MetadataError: the shard has no such field or row.
        ProtocolError: it has other dtypes or row lengths than the metadata promises.
    """
    where = f"shard {wanted.shard_id} on {node_id}"
    rows: Sequence[int] = wanted.rows
    first = first_of_run(rows)
    if first is not None:
        rows = range(first, first + len(rows))
    found = []
    for name, dtype in wanted.fields.items():
        field = held.get(name)
        if field is None:
            raise MetadataError(f"{where} has fields {list(held)}, not {name!r:.200}")
        found.append(field.slices(rows))
        lengths = field.row_lengths
        if first is None:
            lengths = tuple([lengths[row] for row in rows])
        elif len(lengths) != len(rows):
            lengths = lengths[first : first + len(rows)]
        if dtype != field.dtype or lengths != wanted.lengths:
            raise ProtocolError(
                f"{where}, field {name!r:.200}: "
                f"expected {dtype:.20} rows of {_abridged(wanted.lengths)} values, "
                f"got {field.dtype} rows of {_abridged(lengths)}"
            )
    return found


def window(parts: Iterable[memoryview], start: int, num_bytes: int) -> list[memoryview]:
    """The `num_bytes` bytes from `start` on of the parts' concatenation.

    Raises: ProtocolError: the concatenation is shorter.
    """
    found = []
    missing = num_bytes
    for part in parts:
        inside = part[start : start + missing]
        start = max(start - len(part), 0)
        if len(inside):
            found.append(inside)
            missing -= len(inside)
    if missing:
        raise ProtocolError(f"the rows have {num_bytes - missing} of {num_bytes} bytes asked for")
    return found


def cut(transfer: Transfer, max_bytes: int) -> Iterator[Transfer]:
    """The transfer in parts that each fit into a request; empty rows ask for nothing."""
    whole = transfer.rows
    if not whole.num_bytes:
        return
    if (
        whole.num_bytes <= max_bytes
        and whole.num_rows <= MAX_REQUEST_ROWS
        and len(whole.fields) <= MAX_REQUEST_FIELDS
    ):
        yield transfer
        return
    for (name, dtype), destination in zip(whole.fields.items(), transfer.destinations, strict=True):
        itemsize = type_named(dtype).itemsize
        bounds = tuple(accumulate((n * itemsize for n in whole.lengths), initial=0))
        start = 0
        while start < len(destination):
            first = bisect_right(bounds, start) - 1
            last = min(first + MAX_REQUEST_ROWS, len(bounds) - 1)
            end = min(start + max_bytes, bounds[last])
            stop = bisect_left(bounds, end)
            rows = ShardSlice(
                whole.shard_id,
                {name: dtype},
                whole.rows[first:stop],
                whole.lengths[first:stop],
                start - bounds[first],
                end - start,
            )
            yield Transfer(rows, [destination[start:end]])
            start = end


def _stretches(runs: Iterable[RowRun]) -> list[tuple[int, list[int]]]:
    """The rows of a shard at consecutive rows of the batch, each time with the first of those."""
    found: list[tuple[int, list[int]]] = []
    for offset, first, count in runs:
        if not found or offset != found[-1][0] + len(found[-1][1]):
            found.append((offset, []))
        found[-1][1].extend(range(first, first + count))
    return found


def _abridged(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}, … {len(lengths)} in all]" if len(lengths) > 8 else f"[{shown}]"
