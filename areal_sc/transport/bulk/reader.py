"""What an owner answers to a request: the bytes asked for, from where they lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from areal_sc.errors import MetadataError, ProtocolError, ShardGone
from areal_sc.transport.bulk.wire import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_ROWS,
    AskedPart,
    Describe,
    DescribedField,
    Description,
    Failure,
    Found,
    HeldPart,
    Read,
    Reply,
)
from areal_sc.transport.shards.layout import SealedField


class ShardSource(Protocol):
    """What is served: a TensorStore."""

    node_id: str

    def describe(self, shard_id: str) -> Mapping[str, SealedField]: ...


class ShardReader:
    """Reads the shards of one store for peers.

    Args:
        source: the store.
    """

    def __init__(self, source: ShardSource) -> None:
        self._source = source

    def answer(self, request: Read | Describe) -> tuple[Reply, list[memoryview]]:
        """(reply, its payload where it lies); a failure names the part that cannot be read."""
        if isinstance(request, Read):
            return self._read(request.parts)
        try:
            return self._describe(request.shard_id), []
        except (ShardGone, MetadataError) as error:
            return Failure.of(error), []

    def _describe(self, shard_id: str) -> Description:
        fields = self._source.describe(shard_id)
        return Description(
            [
                DescribedField(name, field.dtype, list(field.row_lengths))
                for name, field in fields.items()
            ]
        )

    def _read(self, parts: Sequence[AskedPart]) -> tuple[Reply, list[memoryview]]:
        held = []
        slices: list[memoryview] = []
        room, num_rows = MAX_REPLY_BYTES, MAX_REQUEST_ROWS
        for number, part in enumerate(parts):
            try:
                fields = self._fields(part)
                rows = part.rows or range(part.first, part.first + part.count)
                room -= part.num_bytes
                num_rows -= len(rows) * len(fields)
                if room < 0:
                    raise ProtocolError(f"a reply has at most {MAX_REPLY_BYTES} bytes")
                if num_rows < 0:
                    raise ProtocolError(f"a reply has at most {MAX_REQUEST_ROWS} rows")
                asked = [found for field in fields for found in field.slices(rows)]
                slices += _window(asked, part.skip, part.skip + part.num_bytes)
            except (ShardGone, MetadataError, ProtocolError) as error:
                return Failure.of(error, number), []
            lengths = fields[0].row_lengths
            its_lengths = (
                list(lengths[rows.start : rows.stop])
                if isinstance(rows, range)
                else [lengths[row] for row in rows]
            )
            held.append(HeldPart([field.dtype for field in fields], its_lengths))
        return Found(held), slices

    def _fields(self, part: AskedPart) -> list[SealedField]:
        """The asked fields, at least one, whose rows have the same lengths."""
        held = self._source.describe(part.shard_id)
        fields = []
        for name in part.fields:
            if name not in held:
                raise MetadataError(
                    f"shard {part.shard_id} on {self._source.node_id} has fields {list(held)}, "
                    f"not {name!r:.200}"
                )
            fields.append(held[name])
        if not fields:
            raise ProtocolError(f"shard {part.shard_id}: no field is asked for")
        if any(field.row_lengths != fields[0].row_lengths for field in fields[1:]):
            raise ProtocolError(
                f"shard {part.shard_id}: the rows of {part.fields} differ in length"
            )
        return fields


def _window(slices: list[memoryview], start: int, stop: int) -> list[memoryview]:
    """Bytes `start` to `stop` of the concatenation.

    Raises: ProtocolError: the concatenation is shorter.
    """
    num_bytes = sum(map(len, slices))
    if stop > num_bytes:
        raise ProtocolError(f"the rows have {num_bytes} bytes, not {stop}")
    if (start, stop) == (0, num_bytes):  # as is most common
        return slices
    found = []
    position = 0
    for part in slices:
        inside = part[max(start - position, 0) : max(stop - position, 0)]
        if len(inside):
            found.append(inside)
        position += len(part)
    return found
