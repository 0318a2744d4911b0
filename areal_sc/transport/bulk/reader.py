"""What an owner answers to a request: the bytes asked for, where they lie, cut into frames.

Every frame but the last of a reply is full: one costs each side as much as copying some 200 KiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from areal_sc.errors import MetadataError, ProtocolError, ShardGone
from areal_sc.transport.bulk.wire import MAX_REPLY_BYTES, MAX_REQUEST_ROWS, failure_body
from areal_sc.transport.shard_layout import SealedField

READ: Final = 0
DESCRIBE: Final = 1

Parts = list[memoryview]
"""The payload of one frame, where it lies."""


class ShardSource(Protocol):
    """What is served: a TensorStore."""

    node_id: str

    def describe(self, shard_id: str) -> Mapping[str, SealedField]: ...


class ShardReader:
    """Reads the shards of one store for peers.

    Args:
        source: the store.
        frame_bytes: of payload under one tag, at most.
    """

    def __init__(self, source: ShardSource, frame_bytes: int) -> None:
        self._source = source
        self._frame_bytes = frame_bytes

    def answer(self, body: Any) -> tuple[list[Any], list[Parts]]:
        """(reply body, payload of each frame); a failure names the segment that cannot be read."""
        match body:
            case [int(kind), str(shard_id)] if kind == DESCRIBE:
                return self._describe(shard_id), []
            case [int(kind), [*segments]] if kind == READ:
                return self._read(segments)
        return failure_body(0, ProtocolError(f"no such request: {body!r:.200}")), []

    def _describe(self, shard_id: str) -> list[Any]:
        try:
            fields = self._source.describe(shard_id)
        except (ShardGone, MetadataError) as error:
            return failure_body(0, error)
        return [0, [[name, field.dtype, list(field.row_lengths)] for name, field in fields.items()]]

    def _read(self, segments: Sequence[Any]) -> tuple[list[Any], list[Parts]]:
        held = []
        slices: list[memoryview] = []
        room, num_rows = MAX_REPLY_BYTES, MAX_REQUEST_ROWS
        for number, segment in enumerate(segments):
            try:
                fields, rows, skip, num_bytes = self._asked(segment)
                room -= num_bytes
                num_rows -= len(rows) * len(fields)
                if room < 0:
                    raise ProtocolError(f"a reply has at most {MAX_REPLY_BYTES} bytes")
                if num_rows < 0:
                    raise ProtocolError(f"a reply has at most {MAX_REQUEST_ROWS} rows")
                asked = [part for field in fields for part in field.slices(rows)]
                slices += _window(asked, skip, skip + num_bytes)
            except (ShardGone, MetadataError, ProtocolError) as error:
                return failure_body(number, error), []
            lengths = fields[0].row_lengths
            if isinstance(rows, range):
                its_lengths = lengths[rows.start : rows.stop]
            else:
                its_lengths = tuple(lengths[row] for row in rows)
            held.append([[field.dtype for field in fields], its_lengths])
        return [0, held], self._frames(slices)

    def _asked(self, segment: Any) -> tuple[list[SealedField], Sequence[int], int, int]:
        """(fields, rows, bytes to skip, bytes) of a wire segment, checked before anything else."""
        match segment:
            case [str(shard_id), [_, *_] as names, int(skip), int(num_bytes), *rows] if (
                skip >= 0 and num_bytes >= 0
            ):
                fields = self._fields(shard_id, names)
                lengths = fields[0].row_lengths
                if any(field.row_lengths != lengths for field in fields[1:]):
                    raise ProtocolError(f"shard {shard_id}: the rows of {names} differ in length")
                match rows:
                    case [int(first), int(count)] if 0 <= first <= first + count <= len(lengths):
                        return fields, range(first, first + count), skip, num_bytes
                    case [[*listed]] if all(isinstance(row, int) for row in listed):
                        return fields, listed, skip, num_bytes
                raise ProtocolError(f"shard {shard_id} has {len(lengths)} rows, not {rows!r:.200}")
        raise ProtocolError(f"not a segment: {segment!r:.200}")

    def _fields(self, shard_id: str, names: Sequence[Any]) -> list[SealedField]:
        held = self._source.describe(shard_id)
        fields = []
        for name in names:
            if not isinstance(name, str) or name not in held:
                raise MetadataError(
                    f"shard {shard_id} on {self._source.node_id} has fields {list(held)}, "
                    f"not {name!r:.200}"
                )
            fields.append(held[name])
        return fields

    def _frames(self, slices: Iterable[memoryview]) -> list[Parts]:
        frames: list[Parts] = []
        room = 0
        for part in slices:
            while len(part):
                if not room:
                    frames.append([])
                    room = self._frame_bytes
                frames[-1].append(part[:room])
                part, room = part[room:], max(room - len(part), 0)
        return frames


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
