"""What lies where in a shard, and the ticket by which other processes find it.

A shard is one block of bytes: its fields one after the other, each a packed 1-D tensor that starts
on a cache line. A ticket says in which segment of an arena the block lies, and its layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final

import msgpack
import torch

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.metadata import FIELD_ALIGNMENT_BYTES
from areal_sc.transport.tensor_bytes import dtype_name, dtype_named

TICKET_VERSION: Final = 1
MAX_NAME_BYTES: Final = 256
"""Of a field, in UTF-8: requests name many."""

_FIELD_TYPES: Final = (str, str, int, int)
"""Of a field of a ticket: name, dtype, first byte within the shard, which of the row lengths."""


@dataclass(frozen=True, slots=True)
class SealedField:
    """One field of a sealed shard.

    Attributes:
        dtype: name of the values' dtype.
        row_lengths: values in each row.
        row_bounds: first byte of each row within `values`, and the end; ascending.
        values: read-only bytes of the packed rows.
    """

    dtype: str
    row_lengths: tuple[int, ...]
    row_bounds: tuple[int, ...]
    values: memoryview

    @property
    def numel(self) -> int:
        return sum(self.row_lengths)

    def slices(self, rows: Iterable[int] | None = None) -> list[memoryview]:
        """The bytes of the rows, in the given order; consecutive rows come as one slice.

        Raises: MetadataError: a row is out of range.
        """
        if rows is None:
            return [self.values] if len(self.values) else []
        found = []
        for first, last in _runs(rows):
            if first < 0 or last >= len(self.row_lengths):
                raise MetadataError(
                    f"the shard has rows 0..{len(self.row_lengths) - 1}, not {first}..{last}"
                )
            part = self.values[self.row_bounds[first] : self.row_bounds[last + 1]]
            if len(part):
                found.append(part)
        return found


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies.

    Attributes:
        dtype: name of the values' dtype.
        row_lengths: values in each row.
        row_bounds: first byte of each row within the field, and the end; ascending.
        start: the field's first byte within the shard.
    """

    dtype: str
    row_lengths: tuple[int, ...]
    row_bounds: tuple[int, ...]
    start: int

    @property
    def stop(self) -> int:
        """Byte after the field's last, within the shard."""
        return self.start + self.row_bounds[-1]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where all fields lie.

    Attributes:
        num_bytes: of the shard, the gaps before cache lines included.
        fields: by name, in the order in which they lie.
    """

    num_bytes: int
    fields: Mapping[str, FieldLayout]

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        row_lengths: Mapping[str, Sequence[int]] | Sequence[int],
    ) -> ShardLayout:
        """The layout of a shard that will hold these tensors.

        Args:
            tensors: name -> [T], T = sum of the field's row lengths.
            row_lengths: of each field, or common to all.
        Raises: MetadataError: a tensor is not 1-D, its size is not that of its rows, or its name is
            too long.
        """
        common = None if isinstance(row_lengths, Mapping) else tuple(row_lengths)
        fields = {}
        position = 0
        for name, values in tensors.items():
            check_field_name(name)
            if isinstance(row_lengths, Mapping):
                lengths = tuple(row_lengths.get(name, ()))
            else:
                assert common is not None
                lengths = common
            stored = dtype_name(values.dtype)
            if values.dim() != 1 or min(lengths, default=0) < 0 or values.numel() != sum(lengths):
                raise MetadataError(
                    f"field {name!r}: {len(lengths)} rows with {sum(lengths)} values need a "
                    f"tensor of shape ({sum(lengths)},), got {tuple(values.shape)}"
                )
            field = FieldLayout(stored, lengths, _row_bounds(stored, lengths), position)
            fields[name] = field
            position = _aligned(field.stop)
        return cls(position, fields)

    def over(self, block: memoryview) -> dict[str, SealedField]:
        """The fields in a block that holds a shard of this layout."""
        return {
            name: SealedField(
                field.dtype, field.row_lengths, field.row_bounds, block[field.start : field.stop]
            )
            for name, field in self.fields.items()
        }


@dataclass(frozen=True, slots=True)
class Ticket:
    """Says where a sealed shard lies in its arena.

    Attributes:
        segment: number of the segment file.
        start: the block's first byte within it.
        span: bytes of the block; the shard fills its beginning.
    """

    segment: int
    start: int
    span: int
    layout: ShardLayout

    def to_bytes(self) -> bytes:
        """Row lengths that fields have in common are written once."""
        rows: dict[tuple[int, ...], int] = {}
        fields = [
            [name, field.dtype, field.start, rows.setdefault(field.row_lengths, len(rows))]
            for name, field in self.layout.fields.items()
        ]
        place = [self.segment, self.start, self.span]
        content = [TICKET_VERSION, *place, self.layout.num_bytes, list(rows), fields]
        packed: bytes = msgpack.packb(content)
        return packed

    @classmethod
    def from_bytes(cls, content: bytes) -> Ticket:
        """Inverse of `to_bytes`; whatever it returns, all fields lie within the block.

        Raises: ProtocolError: the bytes are not a ticket of this version.
        """
        try:
            unpacked = msgpack.unpackb(content)
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise ProtocolError(f"a ticket of {len(content)} bytes is not msgpack") from error
        match unpacked:
            case [version, *_] if version != TICKET_VERSION:
                raise ProtocolError(
                    f"expected a ticket of version {TICKET_VERSION}, got {version!r}"
                )
            case [_, int(segment), int(start), int(span), int(num_bytes), [*rows], [*fields]] if (
                min(segment, start, num_bytes) >= 0 and num_bytes <= span
            ):
                lengths = [_row_lengths(row) for row in rows]
                found = _field_layouts(fields, lengths, num_bytes)
                return cls(segment, start, span, ShardLayout(num_bytes, found))
        raise ProtocolError(f"a ticket of {len(content)} bytes is malformed")


def check_field_name(name: str) -> None:
    """Raises: MetadataError: the name is too long to be asked for, or is no text."""
    try:
        num_bytes = len(name.encode())
    except UnicodeEncodeError as error:
        raise MetadataError(f"the name of a field cannot be sent: {name!a}") from error
    if num_bytes > MAX_NAME_BYTES:
        raise MetadataError(
            f"the name of a field has at most {MAX_NAME_BYTES} bytes, got {num_bytes}: {name!r:.80}"
        )


def _field_layouts(
    entries: Sequence[Any], rows: Sequence[tuple[int, ...]], num_bytes: int
) -> dict[str, FieldLayout]:
    """The fields of a ticket, all within its shard. Raises: ProtocolError.

    Written out: a pull reads many tickets. Fields of like rows and sizes of values share bounds.
    """
    found = {}
    shared: dict[tuple[int, int], tuple[int, ...]] = {}
    for entry in entries:
        if type(entry) is not list or len(entry) != 4:
            raise ProtocolError(f"not a field of a ticket: {entry!r:.200}")
        name, dtype, start, row = entry
        if (
            (type(name), type(dtype), type(start), type(row)) != _FIELD_TYPES
            or not 0 <= row < len(rows)
            or start < 0
            or start % FIELD_ALIGNMENT_BYTES
        ):
            raise ProtocolError(f"not a field of a ticket: {entry!r:.200}")
        try:
            key = row, dtype_named(dtype).itemsize
        except MetadataError as error:
            raise ProtocolError(f"field {name!r} of a ticket: {error}") from error
        bounds = shared.get(key)
        if bounds is None:
            bounds = shared[key] = _row_bounds(dtype, rows[row])
        if start + bounds[-1] > num_bytes:
            raise ProtocolError(f"a field of a ticket lies outside its shard of {num_bytes} bytes")
        found[name] = FieldLayout(dtype, rows[row], bounds, start)
    return found


def _runs(rows: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(first, last) of consecutive rows."""
    if isinstance(rows, range) and rows.step == 1:
        if rows:
            yield rows[0], rows[-1]
        return
    for _, run in groupby(enumerate(rows), lambda item: item[1] - item[0]):
        run_rows = [row for _, row in run]
        yield run_rows[0], run_rows[-1]


def _row_lengths(row: Any) -> tuple[int, ...]:
    if type(row) is not list or not {int}.issuperset(map(type, row)) or min(row, default=0) < 0:
        raise ProtocolError("the row lengths of a ticket are not counts")
    return tuple(row)


def _row_bounds(dtype: str, lengths: Sequence[int]) -> tuple[int, ...]:
    itemsize = dtype_named(dtype).itemsize
    return tuple(accumulate([length * itemsize for length in lengths], initial=0))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // FIELD_ALIGNMENT_BYTES) * FIELD_ALIGNMENT_BYTES
