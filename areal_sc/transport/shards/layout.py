"""What lies where in a shard, and the header by which other processes know it.

A shard is one stretch of bytes: its fields one after the other, each a packed 1-D tensor that
starts on a cache line. In shared memory a header with this layout stands before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Annotated, Any, Final, Literal

import msgspec
import torch
from msgspec import Meta, Struct

from areal_sc.errors import MetadataError, ProtocolError
from areal_sc.token_fields import FIELD_ALIGNMENT_BYTES, aligned
from areal_sc.transport.tensor_bytes import tensor_over, type_name, type_named

MAX_NAME_BYTES: Final = 256
"""Most bytes of a field's name in UTF-8: requests name many."""

_LENGTH_BYTES: Final = 8
"""The header begins with its length."""

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]


class _FieldHeader(Struct, array_like=True, forbid_unknown_fields=True):
    """One field; `rows` says which of the header's row lengths are its own."""

    name: str
    dtype: str
    start: Annotated[int, Meta(ge=0, multiple_of=FIELD_ALIGNMENT_BYTES)]
    rows: _Count


class _Header(Struct, array_like=True, forbid_unknown_fields=True):
    """A layout; row lengths that fields have in common are written once."""

    version: Literal[4]
    is_copy: bool
    num_bytes: _Count
    row_lengths: list[tuple[_Count, ...]]
    fields: list[_FieldHeader]
    note: bytes


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Header)


@dataclass(frozen=True, slots=True)
class FieldLayout:
    """Where one field lies.

    Attributes:
        dtype: name of the values' type, see `tensor_bytes.type_named`.
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

    def tensor_in(self, memory: Any) -> torch.Tensor:
        """[T, *shape] all values, where they lie in a buffer that holds the shard."""
        return tensor_over(memory, type_named(self.dtype), self.row_bounds[-1], self.start)


@dataclass(frozen=True, slots=True)
class SealedField(FieldLayout):
    """One field of a sealed shard.

    Attributes:
        values: read-only bytes of the packed rows.
    """

    values: memoryview

    def slices(self, rows: Iterable[int]) -> list[memoryview]:
        """The bytes of the rows, in the given order; consecutive rows come as one slice.

        Raises: MetadataError: a row is out of range.
        """
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
class ShardLayout:
    """Where all fields lie.

    Attributes:
        num_bytes: of the shard, the gaps before cache lines included.
        fields: by name, in the order in which they lie.
        is_copy: what it holds can be had elsewhere; see `TensorStore.begin`.
        note: what its owner wants to know of it later; it lies in the header, beside the shard.
    """

    num_bytes: int
    fields: Mapping[str, FieldLayout]
    is_copy: bool = False
    note: bytes = b""

    @property
    def counted_bytes(self) -> int:
        """What it takes of a store's limit."""
        return 0 if self.is_copy else self.num_bytes

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, torch.Tensor],
        row_lengths: Mapping[str, Sequence[int]] | Sequence[int],
        *,
        is_copy: bool = False,
        note: bytes = b"",
    ) -> ShardLayout:
        """The layout of a shard that will hold these tensors.

        Args:
            tensors: name -> [T, *shape], T = sum of the field's row lengths.
            row_lengths: of each field, or common to all.
        Raises: MetadataError: a tensor is a scalar, its size is not that of its rows, or its name
            is too long.
        """
        if not isinstance(row_lengths, Mapping):
            row_lengths = dict.fromkeys(tensors, tuple(row_lengths))
        fields = {}
        position = 0
        for name, values in tensors.items():
            check_field_name(name)
            lengths = tuple(row_lengths.get(name, ()))
            num_values = sum(lengths)
            if values.dim() < 1 or min(lengths, default=0) < 0 or len(values) != num_values:
                raise MetadataError(
                    f"field {name!r}: {len(lengths)} rows with {num_values} values need a "
                    f"tensor of shape ({num_values}, ...), got {tuple(values.shape)}"
                )
            stored = type_name(values)
            field = FieldLayout(stored, lengths, _row_bounds(stored, lengths), position)
            fields[name] = field
            position = aligned(field.stop)
        return cls(position, fields, is_copy, note)

    def over(self, memory: memoryview) -> dict[str, SealedField]:
        """The fields in memory that holds a shard of this layout."""
        return {
            name: SealedField(
                field.dtype,
                field.row_lengths,
                field.row_bounds,
                field.start,
                memory[field.start : field.stop],
            )
            for name, field in self.fields.items()
        }

    def header(self) -> bytes:
        """The layout, padded so that a shard that follows begins on a cache line."""
        rows: dict[tuple[int, ...], int] = {}
        fields = [
            _FieldHeader(
                name, field.dtype, field.start, rows.setdefault(field.row_lengths, len(rows))
            )
            for name, field in self.fields.items()
        ]
        header = _Header(4, self.is_copy, self.num_bytes, list(rows), fields, self.note)
        packed = _encoder.encode(header)
        num_bytes = aligned(_LENGTH_BYTES + len(packed))
        return (len(packed).to_bytes(_LENGTH_BYTES, "little") + packed).ljust(num_bytes, b"\0")

    @classmethod
    def behind_header(cls, memory: memoryview) -> tuple[ShardLayout, int]:
        """What `header` wrote, and where the shard begins; all of it lies within `memory`.

        Raises: ProtocolError: there is no header of this version, or the shard is longer.
        """
        end = _LENGTH_BYTES + int.from_bytes(memory[:_LENGTH_BYTES], "little")
        try:
            header = _decoder.decode(memory[_LENGTH_BYTES:end])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the header of a shard is malformed: {error!s:.200}") from None
        start = aligned(end)
        if start + header.num_bytes > len(memory):
            raise ProtocolError(
                f"the header names bytes {start} to {start + header.num_bytes} of {len(memory)}"
            )
        layout = cls(header.num_bytes, _field_layouts(header), header.is_copy, header.note)
        return layout, start


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


def _field_layouts(header: _Header) -> dict[str, FieldLayout]:
    """The fields, all within the shard; those of like rows and sizes of values share bounds."""
    found = {}
    shared: dict[tuple[int, int], tuple[int, ...]] = {}
    for field in header.fields:
        if field.rows >= len(header.row_lengths):
            raise ProtocolError(f"the header of a shard, field {field.name!r}: no row lengths")
        lengths = header.row_lengths[field.rows]
        try:
            key = field.rows, type_named(field.dtype).itemsize
        except MetadataError as error:
            raise ProtocolError(f"the header of a shard, field {field.name!r}: {error}") from error
        if key not in shared:
            shared[key] = _row_bounds(field.dtype, lengths)
        layout = FieldLayout(field.dtype, lengths, shared[key], field.start)
        if layout.stop > header.num_bytes:
            raise ProtocolError(
                f"the header of a shard, field {field.name!r}: it ends at byte {layout.stop} of "
                f"{header.num_bytes}"
            )
        found[field.name] = layout
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


def _row_bounds(dtype: str, lengths: Sequence[int]) -> tuple[int, ...]:
    itemsize = type_named(dtype).itemsize
    return tuple(accumulate([length * itemsize for length in lengths], initial=0))
