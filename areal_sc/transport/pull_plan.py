"""Which bytes a pull asks for, and where each of them goes: arithmetic without I/O.

segment   rows of one field of one shard; their bytes lie together at the destination
chunk     a window of bounded size over the concatenation of an owner's segments

    segments   [ row row  row ][ row  row row row ]...
    chunks     [      0      ][      1      ][   2    ]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.shard_ids import parse_shard_id
from areal_sc.transport.socket import Frame
from areal_sc.transport.tensor_bytes import bytes_of, dtype_named


@dataclass(frozen=True, slots=True)
class Owner:
    """One life of the worker that holds a shard."""

    node_id: str
    node_addr: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one field of one shard.

    Attributes:
        rows: rows of the sealed shard, in the order wanted.
        dtype: name of the dtype that the metadata promises.
        lengths: values in each of the rows, as the metadata promises.
        row_bounds: first byte of each row within `destination`, and the end.
        destination: where the rows go, one after the other.
    """

    shard_id: str
    field: str
    rows: Sequence[int]
    dtype: str
    lengths: Sequence[int]
    row_bounds: Sequence[int]
    destination: memoryview

    def check(self, owner: Owner, dtype: Any, lengths: Any, first: int = 0) -> None:
        """Compares what the owner holds, from row `first` on, with what the metadata promised.

        Raises: ProtocolError: they differ.
        """
        wanted = list(self.lengths[first : first + len(lengths)])
        if dtype != self.dtype or list(lengths) != wanted:
            raise ProtocolError(
                f"shard {self.shard_id} on {owner.node_id}, field {self.field!r}: expected "
                f"{self.dtype} rows of {_abridged(wanted)} values, got {dtype} rows of "
                f"{_abridged(lengths)}"
            )


@dataclass(frozen=True, slots=True)
class Part:
    """The share of one segment in a chunk: rows `first` to `stop`, the outer ones maybe cut."""

    segment: Segment
    first: int
    stop: int
    destination: memoryview


@dataclass(frozen=True, slots=True)
class Chunk:
    """Parts whose bytes are asked for at once.

    Attributes:
        start: bytes of the first part's first row that belong to the chunk before.
        num_bytes: size of all destinations together.
    """

    parts: list[Part]
    start: int
    num_bytes: int

    def to_wire(self) -> list[Any]:
        """[shard id, field, rows] of each part; consecutive rows as first row and count."""
        return [
            [p.segment.shard_id, p.segment.field, *_rows_to_wire(p.segment.rows[p.first : p.stop])]
            for p in self.parts
        ]

    def check(self, owner: Owner, held: Any, frames: Sequence[Frame]) -> None:
        """Compares an owner's answer with the metadata before any byte of it is used.

        Args:
            held: [dtype name, lengths of the rows] of each part.

        Raises: ProtocolError: the answer does not have the promised form or sizes.
        """
        first = self.parts[0].segment
        where = f"shard {first.shard_id} on {owner.node_id}, field {first.field!r}"
        if not isinstance(held, list) or len(held) != len(self.parts):
            raise ProtocolError(f"{where}: expected {len(self.parts)} segments in the answer")
        for part, entry in zip(self.parts, held, strict=True):
            match entry:
                case [str(dtype), [*lengths]] if len(lengths) == part.stop - part.first:
                    part.segment.check(owner, dtype, lengths, part.first)
                case _:
                    raise ProtocolError(f"{where}: expected a dtype and row lengths, got {entry!r}")
        received = sum(map(len, frames))
        if received != self.num_bytes:
            raise ProtocolError(f"{where}: expected {self.num_bytes} bytes, got {received}")

    def fill(self, frames: Iterable[Frame]) -> None:
        """Copies the frames, whose sizes were checked, to their destinations."""
        destinations = iter(part.destination for part in self.parts)
        room = memoryview(b"")
        for frame in frames:
            while len(frame):
                if not len(room):
                    room = next(destinations)
                size = min(len(room), len(frame))
                room[:size] = frame[:size]
                room, frame = room[size:], frame[size:]


def segment_of(
    shard_id: str,
    field: str,
    rows: Sequence[int],
    dtype: str,
    lengths: Sequence[int],
    destination: memoryview,
) -> Segment:
    """A segment whose destination has just the size of its rows."""
    itemsize = dtype_named(dtype).itemsize
    bounds = tuple(accumulate((n * itemsize for n in lengths), initial=0))
    assert bounds[-1] == len(destination)
    return Segment(shard_id, field, rows, dtype, lengths, bounds, destination)


def plan_batch(
    batch: BatchMetadata, tensors: dict[str, torch.Tensor]
) -> dict[Owner, list[Segment]]:
    """What to ask of each owner so that `tensors` hold the batch's fields in row order.

    Args:
        tensors: name -> [T] tensor for every field of the batch, T = its tokens.
    """
    lengths = batch.sequence_lengths
    token_bounds = tuple(accumulate(lengths, initial=0))
    memory = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    plan: dict[Owner, list[Segment]] = {}
    for shard in batch.shards:
        if not shard.batch_size:
            continue
        stop = shard.offset + shard.batch_size
        incarnation, _ = parse_shard_id(shard.shard_id)
        owner = Owner(shard.node_id, shard.node_addr, incarnation)
        for name in shard.fields:
            itemsize = tensors[name].element_size()
            first_byte = token_bounds[shard.offset] * itemsize
            last_byte = token_bounds[stop] * itemsize
            plan.setdefault(owner, []).append(
                segment_of(
                    shard.shard_id,
                    name,
                    shard.shard_rows,
                    shard.fields[name].dtype,
                    lengths[shard.offset : stop],
                    memory[name][first_byte:last_byte],
                )
            )
    return plan


def field_dtypes(batch: BatchMetadata) -> dict[str, str]:
    """dtype name of each field.

    Raises: MetadataError: shards disagree about it.
    """
    dtypes: dict[str, str] = {}
    for shard in batch.shards:
        for name, tensor in shard.fields.items():
            if dtypes.setdefault(name, tensor.dtype) != tensor.dtype:
                raise MetadataError(
                    f"batch {batch.batch_id}, field {name!r}: shard {shard.shard_id} on "
                    f"{shard.node_id} holds {tensor.dtype}, others hold {dtypes[name]}"
                )
    return dtypes


def chunks_of(segments: Iterable[Segment], chunk_bytes: int) -> Iterator[Chunk]:
    """Cuts segments into chunks of `chunk_bytes`, the last one smaller; empty rows ask nothing."""
    parts: list[Part] = []
    start, room = 0, chunk_bytes
    for segment in segments:
        bounds = segment.row_bounds
        position = 0
        while position < bounds[-1]:
            end = min(position + room, bounds[-1])
            first = bisect_right(bounds, position) - 1
            if not parts:
                start = position - bounds[first]
            destination = segment.destination[position:end]
            parts.append(Part(segment, first, bisect_left(bounds, end), destination))
            room -= end - position
            position = end
            if not room:
                yield Chunk(parts, start, chunk_bytes)
                parts, room = [], chunk_bytes
    if parts:
        yield Chunk(parts, start, chunk_bytes - room)


def _rows_to_wire(rows: Sequence[int]) -> list[Any]:
    first, count = rows[0], len(rows)
    if count > 1 and all(row == first + i for i, row in enumerate(rows)):
        return [first, count]
    return [list(rows)]


def _abridged(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}, … {len(lengths)} in all]" if len(lengths) > 8 else f"[{shown}]"
