"""Copies out of memory that this process can read: its own store, or another worker's arena.

They are planned on the event loop. Large ones run in a few threads meanwhile: what another core has
just written one core reads at half the speed that memory has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from areal_sc.errors import MetadataError
from areal_sc.transport.pull_plan import Piece, Segment
from areal_sc.transport.shards.layout import SealedField
from areal_sc.transport.slices import Slices

THREAD_COPY_BYTES: Final = 32 << 20
"""Larger copies run in threads; smaller ones the caches hold, and the event loop can wait for."""

NUM_COPY_THREADS: Final = 4

NUMPY_COPY_BYTES: Final = 256 << 10
"""From here on a copy is made without the GIL; that costs a microsecond, for the arrays."""


class Copy(NamedTuple):
    """`keeper` keeps the source's memory from being used again."""

    source: memoryview
    destination: memoryview
    keeper: object


def plan_copy(
    segment: Segment, fields: Mapping[str, SealedField], keeper: object, copies: list[Copy]
) -> int:
    """Adds what has to be copied for a segment; returns its bytes.

    Raises: MetadataError: the shard has no such field or row. ProtocolError: as `Piece.check`.
    """
    piece = segment.piece
    num_bytes = 0
    is_whole = piece.is_run and piece.rows[0] == 0
    for name, destination in zip(piece.fields, segment.destinations, strict=True):
        field = field_of(fields, piece, name)
        if is_whole and len(field.row_lengths) == len(piece.rows):  # as is most common
            piece.check(name, field.dtype, field.row_lengths)
            copies.append(Copy(field.values, destination, keeper))
            num_bytes += len(destination)
            continue
        slices = field.slices(piece.rows)
        piece.check(name, field.dtype, [field.row_lengths[row] for row in piece.rows])
        position = 0
        for source in slices:
            end = position + len(source)
            copies.append(Copy(source, destination[position:end], keeper))
            position = end
        num_bytes += position
    return num_bytes


def field_of(fields: Mapping[str, SealedField], piece: Piece, name: str) -> SealedField:
    """A field of a piece's shard. Raises: MetadataError: it has none of that name."""
    if name not in fields:
        raise MetadataError(
            f"shard {piece.shard_id} on {piece.owner.node_id} has fields {list(fields)}, "
            f"not {name!r}"
        )
    return fields[name]


async def run_copies(copies: list[Copy]) -> None:
    """Makes the copies, and forgets each when it is made: its source may be the last view of it.

    Cancelled, it leaves them to their threads, which keep all they need.
    """
    num_bytes = sum(len(copy.source) for copy in copies)
    if num_bytes <= THREAD_COPY_BYTES:
        slices = Slices()
        while copies:
            _copy(copies.pop())
            await slices.step()
        return
    is_of_large = num_bytes >= len(copies) * NUMPY_COPY_BYTES  # small ones wait for the GIL
    num_threads = NUM_COPY_THREADS if is_of_large else 1
    shares = list(_shares(copies, -(-num_bytes // num_threads)))
    copies.clear()
    await asyncio.gather(*(asyncio.to_thread(_copy_all, share) for share in shares))


def _shares(copies: Iterable[Copy], max_bytes: int) -> Iterator[list[Copy]]:
    """The copies in lists of `max_bytes` each; where a list ends, a copy may be cut."""
    share: list[Copy] = []
    room = max_bytes
    for copy in copies:
        rest = copy
        while len(rest.source) > room:
            source, destination, keeper = rest
            share.append(Copy(source[:room], destination[:room], keeper))
            rest = Copy(source[room:], destination[room:], keeper)
            yield share
            share, room = [], max_bytes
        share.append(rest)
        room -= len(rest.source)
    if room < max_bytes:
        yield share


def _copy_all(copies: list[Copy]) -> None:
    while copies:
        _copy(copies.pop())


def _copy(copy: Copy) -> None:
    if len(copy.source) < NUMPY_COPY_BYTES:
        copy.destination[:] = copy.source
    else:
        target = np.frombuffer(copy.destination, dtype=np.uint8)
        target[:] = np.frombuffer(copy.source, dtype=np.uint8)
