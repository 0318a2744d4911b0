"""Each worker's tensor store: shards that are written once, read by peers, and swept.

A shard holds some fields, each a packed 1-D tensor with its own or the common row lengths, in one
buffer. It is immutable once sealed, and lives until the controller's mark no longer names it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Final, Protocol

import torch

from areal_sc.errors import MetadataError, ShardGone, StoreFull
from areal_sc.metadata import TensorMetadata
from areal_sc.transport.shard_ids import make_shard_id, parse_shard_id
from areal_sc.transport.tensor_bytes import copy_to_bytes, dtype_name, dtype_named

_ALIGNMENT: Final = 64
"""Fields start on cache lines, so that any dtype may be viewed in place."""


class StoreBackend(Protocol):
    """Where the bytes of shards live. Called from any thread."""

    def allocate(self, num_bytes: int) -> memoryview:
        """A writable buffer of bytes."""
        ...

    def seal(self, buffer: memoryview) -> memoryview:
        """The read-only form of a buffer that is complete."""
        ...

    def free(self, buffer: memoryview) -> None:
        """Gives back a buffer, sealed or not; views of it that are being sent stay readable."""
        ...


class HeapBackend:
    """Ordinary memory of the process; freed when the last view of it is dropped."""

    def allocate(self, num_bytes: int) -> memoryview:
        return torch.empty(num_bytes, dtype=torch.uint8).numpy().data

    def seal(self, buffer: memoryview) -> memoryview:
        return buffer.toreadonly()

    def free(self, buffer: memoryview) -> None:
        """Nothing to do: the garbage collector counts the views."""


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

    @property
    def metadata(self) -> TensorMetadata:
        return TensorMetadata((self.numel,), self.dtype)

    def slices(self, rows: Iterable[int] | None = None) -> list[memoryview]:
        """The bytes of the rows, in the given order; consecutive rows come as one slice.

        Raises: MetadataError: a row is out of range.
        """
        if rows is None:
            return [self.values] if len(self.values) else []
        found = []
        for _, run in groupby(enumerate(rows), lambda item: item[1] - item[0]):
            run_rows = [row for _, row in run]
            first, last = run_rows[0], run_rows[-1]
            if first < 0 or last >= len(self.row_lengths):
                raise MetadataError(
                    f"the shard has rows 0..{len(self.row_lengths) - 1}, not {first}..{last}"
                )
            part = self.values[self.row_bounds[first] : self.row_bounds[last + 1]]
            if len(part):
                found.append(part)
        return found


@dataclass(frozen=True, slots=True)
class _Shard:
    buffer: memoryview
    num_bytes: int
    fields: dict[str, SealedField]


class TensorStore:
    """The shards of one incarnation of a worker. Safe to use from several threads.

    Args:
        node_id: the worker's name, for messages.
        incarnation: this life of it; the prefix of all shard ids.
        max_bytes: limit of all buffers together.
        backend: where the bytes live.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        *,
        max_bytes: int,
        backend: StoreBackend | None = None,
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.max_bytes = max_bytes
        self._backend: StoreBackend = backend or HeapBackend()
        self._lock = threading.Lock()
        self._shards: dict[int, _Shard] = {}
        self._last_sequence = 0
        self._reserved_bytes = 0

    @property
    def last_sequence(self) -> int:
        """Sequence number of the newest shard; 0 before the first."""
        return self._last_sequence

    @property
    def num_shards(self) -> int:
        """Shards that can be read."""
        return len(self._shards)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards, those being written included."""
        return self._reserved_bytes

    def put(
        self,
        fields: Mapping[str, torch.Tensor],
        row_lengths: Mapping[str, Sequence[int]] | Sequence[int],
    ) -> str:
        """Copies the fields into a new shard, seals it and returns its id.

        Args:
            fields: name -> [T] tensor on any device, T = sum of the field's row lengths.
            row_lengths: of each field, or common to all.

        Raises:
            MetadataError: a tensor is not 1-D, or its size is not that of its rows.
            StoreFull: the shard does not fit under `max_bytes`.
        """
        lengths: dict[str, tuple[int, ...]]
        if isinstance(row_lengths, Mapping):
            lengths = {name: tuple(row_lengths.get(name, ())) for name in fields}
        else:
            lengths = dict.fromkeys(fields, tuple(row_lengths))
        for name, values in fields.items():
            _check_packed(name, values, lengths[name])
        sizes = [values.numel() * values.element_size() for values in fields.values()]
        starts = list(accumulate(map(_aligned, sizes), initial=0))
        sealed = self._write(fields.values(), starts, sizes)
        held = {
            name: _sealed_field(values.dtype, lengths[name], sealed[start : start + size])
            for (name, values), start, size in zip(fields.items(), starts, sizes, strict=False)
        }
        with self._lock:
            # numbered when sealed: a number below `last_sequence` is never still being written
            self._last_sequence += 1
            sequence = self._last_sequence
            self._shards[sequence] = _Shard(sealed, starts[-1], held)
        return make_shard_id(self.incarnation, sequence)

    def describe(self, shard_id: str) -> dict[str, SealedField]:
        """The fields of a shard.

        Raises: ShardGone: this store does not hold it (any more).
        """
        incarnation, sequence = parse_shard_id(shard_id)
        if incarnation != self.incarnation:
            raise ShardGone(
                f"shard {shard_id} on {self.node_id} is gone: the worker was restarted "
                f"(its incarnation is {self.incarnation} now)"
            )
        with self._lock:
            shard = self._shards.get(sequence)
        if shard is None:
            why = "it was swept" if sequence <= self._last_sequence else "it was never sealed"
            raise ShardGone(f"shard {shard_id} on {self.node_id} is gone: {why}")
        return shard.fields

    def field(self, shard_id: str, name: str) -> SealedField:
        """One field of a shard.

        Raises:
            ShardGone: this store does not hold the shard (any more).
            MetadataError: the shard has no such field.
        """
        fields = self.describe(shard_id)
        if name not in fields:
            raise MetadataError(
                f"shard {shard_id} on {self.node_id} has fields {list(fields)}, not {name!r}"
            )
        return fields[name]

    def read(self, shard_id: str, name: str, rows: Iterable[int] | None = None) -> list[memoryview]:
        """Read-only bytes of the rows of a field, not copied; see `SealedField.slices`."""
        return self.field(shard_id, name).slices(rows)

    def remove(self, shard_id: str) -> None:
        """Drops one shard; nothing happens when it is already gone."""
        incarnation, sequence = parse_shard_id(shard_id)
        if incarnation == self.incarnation:
            with self._lock:
                self._drop(sequence)

    def sweep(self, live: Iterable[int], acknowledged: int, dead: Iterable[int] = ()) -> int:
        """Drops every shard up to `acknowledged` that is not live; returns how many.

        Args:
            live: sequence numbers that are still referenced.
            acknowledged: all shards up to this number are known to whoever made `live`; younger
                ones may still be on their way to it, and are kept.
            dead: sequence numbers that are dropped whatever their age.
        """
        kept, named = set(live), set(dead)
        with self._lock:
            unreferenced = [
                n for n in self._shards if n in named or (n <= acknowledged and n not in kept)
            ]
            for sequence in unreferenced:
                self._drop(sequence)
        return len(unreferenced)

    def _write(
        self, tensors: Iterable[torch.Tensor], starts: Sequence[int], sizes: Sequence[int]
    ) -> memoryview:
        """A sealed buffer with the tensors at their starts; `starts` ends with its whole size."""
        num_bytes = starts[-1]
        self._reserve(num_bytes)
        buffer: memoryview | None = None
        try:
            buffer = self._backend.allocate(num_bytes)
            for values, start, size in zip(tensors, starts, sizes, strict=False):
                copy_to_bytes(values, buffer[start : start + size])
            return self._backend.seal(buffer)
        except BaseException:
            if buffer is not None:
                self._backend.free(buffer)
            with self._lock:
                self._reserved_bytes -= num_bytes
            raise

    def _reserve(self, num_bytes: int) -> None:
        with self._lock:
            if self._reserved_bytes + num_bytes > self.max_bytes:
                raise StoreFull(
                    f"the tensor store of {self.node_id} is full: a shard of {num_bytes} bytes "
                    f"does not fit beside the {self._reserved_bytes} bytes held, the limit is "
                    f"{self.max_bytes} bytes; raise the limit or keep fewer rows in flight"
                )
            self._reserved_bytes += num_bytes

    def _drop(self, sequence: int) -> None:
        shard = self._shards.pop(sequence, None)
        if shard is not None:
            self._reserved_bytes -= shard.num_bytes
            self._backend.free(shard.buffer)


def _check_packed(name: str, values: torch.Tensor, lengths: tuple[int, ...]) -> None:
    dtype_name(values.dtype)
    if values.dim() != 1 or values.numel() != sum(lengths) or min(lengths, default=0) < 0:
        raise MetadataError(
            f"field {name!r}: {len(lengths)} rows with {sum(lengths)} values need a tensor of "
            f"shape ({sum(lengths)},), got {tuple(values.shape)}"
        )


def _sealed_field(dtype: torch.dtype, lengths: tuple[int, ...], values: memoryview) -> SealedField:
    name = dtype_name(dtype)
    itemsize = dtype_named(name).itemsize
    bounds = tuple(accumulate((n * itemsize for n in lengths), initial=0))
    return SealedField(name, lengths, bounds, values)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
