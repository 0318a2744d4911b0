"""A tensor store's bytes in shared memory, where pullers on the node map them.

One arena per incarnation of a worker; `arena_blocks.py` says how blocks live, and why a puller
never reads one that is being reused. A successor takes the arenas of its dead predecessors over:
it serves the shards that have a ticket, gives all else back to the system, and puts nothing new
there.
"""

from __future__ import annotations

import logging
import threading
from typing import Final

from areal_sc.errors import ProtocolError, TransportError
from areal_sc.transport.arena.blocks import Arena, Block, Segment, is_out_of_room, storage_error
from areal_sc.transport.arena.folder import ArenaFolder
from areal_sc.transport.arena.free_extents import block_span
from areal_sc.transport.shard_layout import Ticket
from areal_sc.transport.tensor_store import AdoptedShard

FIRST_SEGMENT_BYTES: Final = 16 << 20
MAX_SEGMENT_BYTES: Final = 256 << 20
IDLE_SWEEPS: Final = 8
"""A segment that was empty for so many sweeps is deleted: what comes and goes with every training
step finds its memory in place, and a burst does not keep its own for ever."""

logger = logging.getLogger(__name__)


class ArenaBackend:
    """A `StoreBackend` in shared memory. Safe to use from several threads.

    Args:
        folder: the arenas of the run; closed after the backend.
        worker: name of the worker.
        incarnation: this life of it.
        first_segment_bytes: later segments are twice as large as the largest one,
        max_segment_bytes: up to this; a shard that is larger gets a segment of its own size.

    Raises: TransportError: the arena cannot be made.
    """

    def __init__(
        self,
        folder: ArenaFolder,
        worker: str,
        incarnation: str,
        *,
        first_segment_bytes: int = FIRST_SEGMENT_BYTES,
        max_segment_bytes: int = MAX_SEGMENT_BYTES,
    ) -> None:
        self._folder = folder
        self._worker = worker
        self._first_segment_bytes = block_span(first_segment_bytes)
        self._max_segment_bytes = block_span(max_segment_bytes)
        self._own = Arena(folder.create(worker, incarnation), gives_back=False)
        self._adopted: tuple[Arena, ...] = ()
        self._growing = threading.Lock()
        self._adopting = threading.Lock()
        self._num_segments_made = 0

    @property
    def retired_bytes(self) -> int:
        """Bytes of shards that are gone but still read, here or by pullers."""
        return sum(arena.retired_bytes for arena in (self._own, *self._adopted))

    def allocate(self, num_bytes: int) -> Block:
        """A block to be filled and sealed.

        Raises: StoreFull: the folder has no room. TransportError: it cannot be used.
        """
        self._check_owned()
        span = block_span(num_bytes)
        block = self._own.take(num_bytes, span)
        if block is None:
            # under a lock of its own: reserving gigabytes takes a while, others find room meanwhile
            with self._growing:
                while (block := self._own.take(num_bytes, span)) is None:
                    self._own.add(self._new_segment(span))
        return block

    def reclaim(self) -> None:
        """Takes back the blocks that nobody reads any more."""
        for arena in (self._own, *self._adopted):
            arena.reclaim()

    def end_sweep(self) -> None:
        """Reclaims, and returns to the system what was not needed lately."""
        self.reclaim()
        self._own.end_sweep(IDLE_SWEEPS)
        self._drop_empty()

    def adopt(self) -> list[AdoptedShard]:
        """Takes over the arenas of dead predecessors; returns their sealed shards.

        Raises: TransportError: one cannot be mapped.
        """
        self._check_owned()
        shards = []
        with self._adopting:
            for files in self._folder.take_over(self._worker):
                arena = Arena(files, gives_back=True)
                self._adopted += (arena,)
                try:
                    shards += _sealed_shards(arena)
                except OSError as error:
                    raise storage_error(files, 0, error) from error
        self._drop_empty()
        return shards

    def close(self) -> None:
        """Deletes the own arena and the adopted ones. Views that are left stay readable."""
        for arena in (self._own, *self._adopted):
            arena.files.remove()
        self._adopted = ()

    def _new_segment(self, span: int) -> Segment:
        """One that takes `span` bytes at least; just as many where there is no room for more."""
        files = self._own.files
        wanted = max(self._first_segment_bytes, 2 * self._own.largest_segment_bytes)
        size = max(min(wanted, self._max_segment_bytes), span)
        self._num_segments_made += 1
        try:
            try:
                return Segment.create(files, self._num_segments_made, size)
            except OSError as error:
                if size == span or not is_out_of_room(error):
                    raise
            return Segment.create(files, self._num_segments_made, span)
        except OSError as error:
            raise storage_error(files, span, error) from error

    def _drop_empty(self) -> None:
        with self._adopting:
            empty = [arena for arena in self._adopted if arena.is_empty]
            self._adopted = tuple(arena for arena in self._adopted if arena not in empty)
        for arena in empty:
            arena.files.remove()

    def _check_owned(self) -> None:
        if not self._own.files.is_owned:
            raise TransportError(
                f"the arena {self._own.files.path} was closed, or belongs to the process that "
                "this one was forked from"
            )


def _sealed_shards(arena: Arena) -> list[AdoptedShard]:
    """Maps an arena that was taken over; what lies between its shards is retired.

    Pullers may still read some of that: shards that were swept before their owner died.
    """
    files = arena.files
    segments = {}
    for number in files.segments():
        if files.segment_bytes(number):
            segments[number] = Segment.open(files, number)
            arena.add(segments[number])
        else:  # its owner died before the space was reserved
            files.remove_segment(number)
    shards = []
    for sequence in files.tickets():
        why = "no such block"
        try:
            ticket = Ticket.from_bytes(files.read_ticket(sequence))
            segment = segments.get(ticket.segment)
        except ProtocolError as error:
            segment, why = None, str(error)
        if segment is None or not segment.free.take_at(ticket.start, ticket.span):
            logger.warning("shard %s.%d is lost: %s", files.incarnation, sequence, why)
            files.remove_ticket(sequence)
            continue
        num_bytes = ticket.layout.num_bytes
        block = Block(arena, segment, ticket.start, ticket.span, num_bytes, sequence)
        shards.append(AdoptedShard(files.incarnation, sequence, ticket.layout, block))
    for segment in segments.values():
        for start, span in segment.free.extents():
            segment.free.take_at(start, span)
            Block(arena, segment, start, span, num_bytes=0).free()
    return shards
