"""The blocks of one arena: taken, sealed, retired, and free again when nobody reads them.

    seal     the ticket appears under the shard's number: pullers may map the block
    free     the ticket is deleted first, then the block is retired
    reuse    once no view of the block is left in this process, and no puller has locked it

Why no puller ever reads a block that is being reused: it locks the block, and *then* looks whether
the ticket is still there; the writer deletes the ticket, and *then* looks for locks. Whoever comes
second sees the other. Locks end with their process, so a dead puller keeps nothing.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_sc.errors import StoreFull, TransportError
from areal_sc.transport.arena.files import ArenaFiles
from areal_sc.transport.arena.free_extents import FreeExtents
from areal_sc.transport.arena.memory import MappedFile
from areal_sc.transport.shard_layout import ShardLayout, Ticket

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


class Segment:
    """A file of blocks.

    Attributes:
        free: its free bytes.
        touched: number of the sweep before which a block was last taken or given back.
    """

    def __init__(self, number: int, file: MappedFile) -> None:
        self.number = number
        self.file = file
        self.free = FreeExtents(file.num_bytes)
        self.touched = 0

    @classmethod
    def create(cls, files: ArenaFiles, number: int, num_bytes: int) -> Segment:
        """A new one, reserved and with its pages in place.

        Raises: OSError: there is no room.
        """
        files.create_segment(number, num_bytes)
        try:
            file = MappedFile(files.segment_path(number), writable=True, populate=True)
        except OSError:
            files.remove_segment(number)
            raise
        return cls(number, file)

    @classmethod
    def open(cls, files: ArenaFiles, number: int) -> Segment:
        """One that a predecessor made."""
        return cls(number, MappedFile(files.segment_path(number), writable=True))


class Block:
    """Some bytes of a segment, in the hands of a store until it frees them.

    Args:
        num_bytes: of the shard, which fills the beginning of `span` bytes from `start`.
        sequence: number of the shard when it is sealed already.
    """

    def __init__(
        self,
        arena: Arena,
        segment: Segment,
        start: int,
        span: int,
        num_bytes: int,
        sequence: int | None = None,
    ) -> None:
        self.segment = segment
        self.start = start
        self.span = span
        self.num_bytes = num_bytes
        self._arena = arena
        self._sequence = sequence
        array = segment.file.memory[start : start + span]
        # every view of the block refers to this array, so the end of the last one is its end
        self._array: NDArray[np.uint8] | None = array
        self._viewed = weakref.ref(array)

    @property
    def memory(self) -> memoryview:
        """The bytes of the shard, to be written until it is sealed."""
        assert self._array is not None
        return self._array.data[: self.num_bytes]

    def seal(self, sequence: int, layout: ShardLayout) -> None:
        """Lets other processes find the block by its shard's number.

        Raises: StoreFull: no room for the ticket. TransportError: it cannot be written.
        """
        ticket = Ticket(self.segment.number, self.start, self.span, layout).to_bytes()
        try:
            self._arena.files.write_ticket(sequence, ticket)
        except OSError as error:
            raise storage_error(self._arena.files, len(ticket), error) from error
        self._sequence = sequence

    def free(self) -> None:
        """Gives the block back, sealed or not; it is reused once nobody reads it."""
        if self._sequence is not None:
            self._arena.files.remove_ticket(self._sequence)
        self._array = None
        self._arena.retire(self)

    @property
    def is_read(self) -> bool:
        """It was freed, but is still viewed in this process or locked by a puller."""
        if self._viewed() is not None:
            return True
        return self.segment.file.is_locked_elsewhere(self.start, self.span)


class Arena:
    """The segments and retired blocks of one arena. Safe to use from several threads.

    Args:
        gives_back: nothing new is put in, so what is free goes back to the system at once.

    Attributes:
        retired_bytes: of shards that are gone but still read.
    """

    def __init__(self, files: ArenaFiles, *, gives_back: bool) -> None:
        self.files = files
        self.retired_bytes = 0
        self._gives_back = gives_back
        self._lock = threading.Lock()
        self._segments: list[Segment] = []
        self._retired: list[Block] = []
        self._num_sweeps = 0

    @property
    def largest_segment_bytes(self) -> int:
        with self._lock:
            return max((segment.file.num_bytes for segment in self._segments), default=0)

    def add(self, segment: Segment) -> None:
        with self._lock:
            segment.touched = self._num_sweeps
            self._segments.append(segment)

    def take(self, num_bytes: int, span: int) -> Block | None:
        """A block out of the first segment with room; retired blocks are looked at when none has
        any."""
        with self._lock:
            found = self._first_fit(span)
            if found is None and self._reclaim():
                found = self._first_fit(span)
            if found is None:
                return None
            segment, start = found
            segment.touched = self._num_sweeps
            return Block(self, segment, start, span, num_bytes)

    def retire(self, block: Block) -> None:
        with self._lock:
            if block.is_read:
                self._retired.append(block)
                self.retired_bytes += block.num_bytes
            else:
                self._release(block)

    def reclaim(self) -> None:
        """Frees the retired blocks that nobody reads any more."""
        with self._lock:
            self._reclaim()

    def end_sweep(self, idle_sweeps: int) -> None:
        """Counts a sweep, and deletes the segments that have been empty for so many."""
        with self._lock:
            self._num_sweeps += 1
            self._drop_if(
                lambda segment: (
                    segment.free.is_whole and segment.touched + idle_sweeps <= self._num_sweeps
                )
            )

    @property
    def is_empty(self) -> bool:
        """It has no segment."""
        with self._lock:
            return not self._segments

    def _first_fit(self, span: int) -> tuple[Segment, int] | None:
        for segment in self._segments:
            start = segment.free.take(span)
            if start is not None:
                return segment, start
        return None

    def _reclaim(self) -> bool:
        """Whether anything came free."""
        retired, self._retired = self._retired, []
        for block in retired:
            if block.is_read:
                self._retired.append(block)
            else:
                self.retired_bytes -= block.num_bytes
                self._release(block)
        return len(self._retired) < len(retired)

    def _release(self, block: Block) -> None:
        segment = block.segment
        segment.free.give(block.start, block.span)
        segment.touched = self._num_sweeps
        if self._gives_back:
            if segment.free.is_whole:
                self._drop_if(lambda other: other is segment)
            else:
                segment.file.punch_hole(block.start, block.span)

    def _drop_if(self, is_dropped: Callable[[Segment], bool]) -> None:
        for segment in filter(is_dropped, self._segments):
            self.files.remove_segment(segment.number)
        self._segments = [segment for segment in self._segments if not is_dropped(segment)]


def storage_error(files: ArenaFiles, num_bytes: int, error: OSError) -> TransportError:
    """What a failure of the file system means to the user of a store."""
    if error.errno not in _NO_ROOM:
        return TransportError(f"the arena {files.path} cannot be used: {error.strerror}")
    space = os.statvfs(files.path)
    return StoreFull(
        f"the arena {files.path} cannot take {num_bytes} bytes more ({error.strerror}): its file "
        f"system has {space.f_bavail * space.f_frsize} of {space.f_blocks * space.f_frsize} bytes "
        "free; enlarge it (/dev/shm in Docker: --shm-size), choose another folder, or lower "
        "store_bytes"
    )


def is_out_of_room(error: OSError) -> bool:
    """The file system, a quota or a limit of the process is exhausted."""
    return error.errno in _NO_ROOM
