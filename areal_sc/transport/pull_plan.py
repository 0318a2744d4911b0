"""Which bytes a pull asks for, and where each of them goes: arithmetic without I/O.

segment   rows of one field of one shard; their bytes lie together at the destination
part      what one request asks of a segment: some of its rows, the outer ones maybe cut

    segments   [ row row  row ][ row  row row row ]...
    parts      [    0    ][ 1 ][    2    ][   3   ]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.metadata import BatchMetadata
from areal_sc.transport.shard_ids import parse_shard_id
from areal_sc.transport.tensor_bytes import dtype_named


@dataclass(frozen=True, slots=True)
class Owner:
    """One life of the worker that holds a shard."""

    node_id: str
    node_addr: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one field of one shard, which lie together in what is pulled.

    Attributes:
        rows: rows of the sealed shard, in the order wanted.
        dtype: name of the dtype that the metadata promises.
        lengths: values in each of the rows, as the metadata promises.
    """

    owner: Owner
    shard_id: str
    field: str
    rows: Sequence[int]
    dtype: str
    lengths: Sequence[int]

    @property
    def is_run(self) -> bool:
        """The rows follow each other in the shard."""
        rows = self.rows
        return len(rows) > 0 and list(rows) == list(range(rows[0], rows[0] + len(rows)))

    @property
    def num_bytes(self) -> int:
        return sum(self.lengths) * dtype_named(self.dtype).itemsize

    def check(self, dtype: Any, lengths: Any, first: int = 0) -> None:
        """Compares what the owner holds, from row `first` on, with what the metadata promised.

        Raises: ProtocolError: they differ.
        """
        wanted = tuple(self.lengths[first : first + len(lengths)])
        if dtype != self.dtype or tuple(lengths) != wanted:
            raise ProtocolError(
                f"shard {self.shard_id} on {self.owner.node_id}, field {self.field!r}: expected "
                f"{self.dtype} rows of {_abridged(wanted)} values, got {dtype} rows of "
                f"{_abridged(lengths)}"
            )


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece, and where it goes.

    Attributes:
        row_bounds: first byte of each row within `destination`, and the end.
        destination: of just the size of the rows, which go there one after the other.
    """

    piece: Piece
    row_bounds: Sequence[int]
    destination: memoryview

    @classmethod
    def create(cls, piece: Piece, destination: memoryview) -> Segment:
        itemsize = dtype_named(piece.dtype).itemsize
        bounds = tuple(accumulate((n * itemsize for n in piece.lengths), initial=0))
        assert bounds[-1] == len(destination)
        return cls(piece, bounds, destination)


@dataclass(frozen=True, slots=True)
class Part:
    """A share of one segment.

    Attributes:
        first, stop: rows of the segment, as numbers within it.
        skip: bytes of row `first` that belong to the part before.
        destination: where the part's bytes go; gives their number.
    """

    segment: Segment
    first: int
    stop: int
    skip: int
    destination: memoryview

    def to_wire(self) -> list[Any]:
        """[shard id, field, skip, number of bytes, rows], consecutive rows as first and count."""
        piece = self.segment.piece
        wire: list[Any] = [piece.shard_id, piece.field, self.skip, len(self.destination)]
        rows = piece.rows[self.first : self.stop]
        first, count = rows[0], len(rows)
        if count > 1 and all(row == first + i for i, row in enumerate(rows)):
            return [*wire, first, count]
        return [*wire, list(rows)]

    def check(self, held: Any) -> None:
        """Compares what the owner says of the rows with the metadata.

        Args:
            held: [dtype name, lengths of the rows].

        Raises: ProtocolError: they differ.
        """
        piece = self.segment.piece
        match held:
            case [str(dtype), [*lengths]] if len(lengths) == self.stop - self.first:
                piece.check(dtype, lengths, self.first)
            case _:
                raise ProtocolError(
                    f"shard {piece.shard_id} on {piece.owner.node_id}, field {piece.field!r}: "
                    f"expected a dtype and row lengths, got {held!r:.200}"
                )


class SegmentCursor:
    """Cuts segments into parts, one after the other; empty rows ask for nothing."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = deque(s for s in segments if s.row_bounds[-1])
        self._position = 0  # in bytes, within the first segment that is left

    @property
    def is_done(self) -> bool:
        return not self._segments

    def take(self, max_bytes: int, max_rows: int) -> list[Part]:
        """The next parts, of at most so many bytes and rows together."""
        parts = []
        while max_bytes and max_rows and self._segments:
            segment, position = self._segments[0], self._position
            bounds = segment.row_bounds
            first = bisect_right(bounds, position) - 1
            end = min(position + max_bytes, bounds[min(first + max_rows, len(bounds) - 1)])
            stop = bisect_left(bounds, end)
            skip = position - bounds[first]
            parts.append(Part(segment, first, stop, skip, segment.destination[position:end]))
            max_bytes -= end - position
            max_rows -= stop - first
            self._position = end
            if end == bounds[-1]:
                self._segments.popleft()
                self._position = 0
        return parts


def pieces_of(batch: BatchMetadata) -> dict[str, list[Piece]]:
    """Name -> the pieces that, one after the other, are the field's rows."""
    lengths = batch.sequence_lengths
    pieces: dict[str, list[Piece]] = {}
    for shard in sorted(batch.shards, key=lambda shard: shard.offset):
        if not shard.batch_size:
            continue
        owner = Owner(shard.node_id, shard.node_addr, parse_shard_id(shard.shard_id)[0])
        its_lengths = lengths[shard.offset : shard.offset + shard.batch_size]
        for name, tensor in shard.fields.items():
            pieces.setdefault(name, []).append(
                Piece(owner, shard.shard_id, name, shard.shard_rows, tensor.dtype, its_lengths)
            )
    return pieces


def segments_of(pieces: Iterable[Piece], destination: memoryview) -> Iterator[Segment]:
    """The pieces laid one after the other into a destination of their size together."""
    position = 0
    for piece in pieces:
        end = position + piece.num_bytes
        yield Segment.create(piece, destination[position:end])
        position = end
    assert position == len(destination)


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


def _abridged(lengths: Sequence[int]) -> str:
    shown = ", ".join(map(str, lengths[:8]))
    return f"[{shown}, … {len(lengths)} in all]" if len(lengths) > 8 else f"[{shown}]"
