"""Which bytes a pull asks for, and where each of them goes: arithmetic without I/O.

piece     rows of one shard, of some of its fields
segment   a piece, and the place of each of its fields in what is pulled
source    a piece, and the tensors that it is a part of
part      what one request asks of a segment: several fields whole, or a share of one field: some of
          its rows, the outer ones maybe cut

    segments   [ field | field | field ][ field | field | field ]...
    parts      [    part 0     ][  1   ][        part 2         ]
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from areal_sc.errors import ProtocolError
from areal_sc.metadata import TRAJECTORY_FIELDS, BatchMetadata, Run
from areal_sc.transport.bulk.wire import AskedPart
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.tensor_bytes import dtype_named

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Owner:
    """One life of the worker that holds a shard."""

    node_id: str
    node_addr: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one shard.

    Attributes:
        fields: name -> name of the dtype that the metadata promises.
        rows: rows of the sealed shard, in the order wanted.
        lengths: values in each of the rows, in every field, as the metadata promises.
    """

    owner: Owner
    shard_id: str
    fields: Mapping[str, str]
    rows: Sequence[int]
    lengths: Sequence[int]

    @property
    def is_run(self) -> bool:
        """The rows follow each other in the shard."""
        rows = self.rows
        return len(rows) > 0 and list(rows) == list(range(rows[0], rows[0] + len(rows)))

    @property
    def num_values(self) -> int:
        """In each field."""
        return sum(self.lengths)

    @property
    def num_bytes(self) -> int:
        return self.num_values * sum(dtype_named(dtype).itemsize for dtype in self.fields.values())

    def check(self, field: str, dtype: str, lengths: Sequence[int], first: int = 0) -> None:
        """Compares what the owner holds, from row `first` on, with what the metadata promised.

        Raises: ProtocolError: they differ.
        """
        wanted = tuple(self.lengths[first : first + len(lengths)])
        if dtype != self.fields[field] or tuple(lengths) != wanted:
            raise ProtocolError(
                f"{self._place_of(field)}: expected {self.fields[field]} rows of "
                f"{_abridged(wanted)} values, got {dtype} rows of {_abridged(lengths)}"
            )

    def _place_of(self, field: str) -> str:
        return f"shard {self.shard_id} on {self.owner.node_id}, field {field!r}"


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece, and where it goes.

    Attributes:
        destinations: of each field, in the piece's order; of just the size of its rows, which go
            there one after the other.
    """

    piece: Piece
    destinations: Sequence[memoryview]

    @property
    def num_bytes(self) -> int:
        return sum(map(len, self.destinations))


@dataclass(frozen=True, slots=True)
class Source(Generic[K]):
    """A piece, and the tensors that it is a part of.

    Attributes:
        keys: of those, by the piece's field.
        first: where it begins in each of them, in values.
    """

    piece: Piece
    keys: Mapping[str, K]
    first: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A share of one segment.

    Attributes:
        fields: names; of several fields it has all rows, whole.
        first, stop: rows of the segment, as numbers within it.
        skip: bytes of row `first` that belong to the part before.
        destinations: where the bytes of each field go.
        num_bytes: of all of them.
    """

    segment: Segment
    fields: Sequence[str]
    first: int
    stop: int
    skip: int
    destinations: Sequence[memoryview]
    num_bytes: int

    @property
    def num_rows(self) -> int:
        """Rows of all fields together."""
        return (self.stop - self.first) * len(self.fields)

    @property
    def asked(self) -> AskedPart:
        """What the owner is asked for."""
        piece = self.segment.piece
        rows = piece.rows[self.first : self.stop]
        first, count = rows[0], len(rows)
        wanted = piece.shard_id, list(self.fields), self.skip, self.num_bytes
        if all(row == first + i for i, row in enumerate(rows)):
            return AskedPart(*wanted, first, count)
        return AskedPart(*wanted, rows=list(rows))

    def check(self, dtypes: Sequence[str], lengths: Sequence[int]) -> None:
        """Compares what the owner says of the rows with the metadata.

        Args:
            dtypes: names of each field's dtype.
            lengths: values in each of the rows.

        Raises: ProtocolError: they differ.
        """
        piece = self.segment.piece
        if len(dtypes) != len(self.fields) or len(lengths) != self.stop - self.first:
            raise ProtocolError(
                f"shard {piece.shard_id} on {piece.owner.node_id}, fields {self.fields}: expected "
                f"{len(self.fields)} dtypes and {self.stop - self.first} row lengths, "
                f"got {len(dtypes)} and {len(lengths)}"
            )
        for name, dtype in zip(self.fields, dtypes, strict=True):
            piece.check(name, dtype, lengths, self.first)


class SegmentCursor:
    """Cuts segments into parts, one after the other; empty rows ask for nothing.

    Args:
        uncut_bytes: a segment of at most that many bytes is asked for whole.
    """

    def __init__(self, segments: Iterable[Segment], uncut_bytes: int = 0) -> None:
        self._segments = deque(s for s in segments if any(map(len, s.destinations)))
        self._uncut_bytes = uncut_bytes
        # within the first segment that is left
        self._field = 0
        self._position = 0  # in bytes
        self._row_bounds: Sequence[int] = ()  # first value of each row, and the end

    @property
    def is_done(self) -> bool:
        return not self._segments

    def clear(self) -> None:
        """Nothing more is wanted."""
        self._segments.clear()

    def take(self, max_bytes: int, max_rows: int, max_fields: int) -> list[Part]:
        """The next parts, of at most so many bytes, fields, and rows of each field together.

        Fewer bytes, or none, where the next segment is to stay whole and does not fit.
        """
        parts: list[Part] = []
        while max_bytes and max_rows and max_fields and self._segments:
            segment = self._segments[0]
            part = self._whole_fields(segment, max_bytes, max_rows, max_fields)
            if part is None:
                if self._is_at_start and max_bytes < segment.num_bytes <= self._uncut_bytes:
                    break
                part = self._share_of_field(segment, max_bytes, max_rows)
            parts.append(part)
            max_bytes -= part.num_bytes
            max_rows -= part.num_rows
            max_fields -= len(part.fields)
        return parts

    @property
    def _is_at_start(self) -> bool:
        return self._field == self._position == 0

    def _whole_fields(
        self, segment: Segment, max_bytes: int, max_rows: int, max_fields: int
    ) -> Part | None:
        """As many of the next fields as fit; all of the segment, where it is to stay whole."""
        num_rows = len(segment.piece.rows)
        max_fields = min(max_fields, max_rows // num_rows)
        if self._position or not max_fields:
            return None
        stop, num_bytes = self._field, 0
        for destination in segment.destinations[self._field : self._field + max_fields]:
            if num_bytes + len(destination) > max_bytes:
                break
            stop, num_bytes = stop + 1, num_bytes + len(destination)
        if stop == self._field or (
            stop < len(segment.destinations)
            and self._is_at_start
            and segment.num_bytes <= self._uncut_bytes
        ):
            return None
        names = tuple(segment.piece.fields)[self._field : stop]
        places = segment.destinations[self._field : stop]
        self._advance(segment, stop)
        return Part(segment, names, 0, num_rows, 0, places, num_bytes)

    def _share_of_field(self, segment: Segment, max_bytes: int, max_rows: int) -> Part:
        """Of the next field as much as fits."""
        name, dtype = list(segment.piece.fields.items())[self._field]
        destination, position = segment.destinations[self._field], self._position
        itemsize = dtype_named(dtype).itemsize
        bounds = self._row_bounds = self._row_bounds or tuple(
            accumulate(segment.piece.lengths, initial=0)
        )
        first = bisect_right(bounds, position // itemsize) - 1
        last = bounds[min(first + max_rows, len(bounds) - 1)] * itemsize
        end = min(position + max_bytes, last)
        stop = bisect_left(bounds, -(-end // itemsize))
        skip = position - bounds[first] * itemsize
        part = Part(
            segment, (name,), first, stop, skip, (destination[position:end],), end - position
        )
        self._position = end
        if end == len(destination):
            self._advance(segment, self._field + 1)
        return part

    def _advance(self, segment: Segment, field: int) -> None:
        self._field, self._position = field, 0
        if field == len(segment.destinations):
            self._segments.popleft()
            self._field, self._row_bounds = 0, ()


def sources_of(
    batch: BatchMetadata, fields: Sequence[str] | None, rows: Sequence[int] | None
) -> tuple[BatchMetadata, dict[str, str], list[Source[str]]]:
    """The asked part of a batch, the dtype name of each of its fields, and where its rows lie.

    Raises: MetadataError: a field or row is not in the batch.
    """
    if fields is not None and batch.total_batch_size:
        batch = batch.select(fields)
    dtypes = batch.dtypes
    if not batch.total_batch_size:
        dtypes = {name: TRAJECTORY_FIELDS.get(name, "float32") for name in fields or ()}
    if rows is not None:
        batch = batch.take(rows)
    sources = [
        Source(piece, {name: name for name in piece.fields}, first)
        for piece, first in pieces_of(batch)
    ]
    return batch, dtypes, sources


def pieces_of(batch: BatchMetadata) -> list[tuple[Piece, int]]:
    """The rows of each shard, as they lie together in the batch, and how many values of the batch
    come before them."""
    lengths = batch.sequence_lengths
    starts = tuple(accumulate(lengths, initial=0))
    pieces = []
    for columns in batch.columns:
        for shard in columns.shards:
            owner = Owner(shard.node_id, shard.node_addr, parse_shard_id(shard.shard_id)[0])
            for offset, rows in _stretches(shard.runs):
                of_rows = lengths[offset : offset + len(rows)]
                piece = Piece(owner, shard.shard_id, columns.dtypes, rows, of_rows)
                pieces.append((piece, starts[offset]))
    return pieces


def _stretches(runs: Iterable[Run]) -> list[tuple[int, list[int]]]:
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
