"""A tensor store's bytes in shared memory, where pullers on the node map them.

    allocate   a block: a file that is allocated and mapped, new or used before
    seal       the shard's ticket appears, a link to the block: pullers may map it
    free       the ticket is deleted first, then the block is retired
    reuse      once no view of the shard is left in this process, and no puller has locked it

Why no puller ever reads a block that is being reused: it locks the shard's number, and *then* looks
for the ticket; the writer deletes the ticket, and *then* looks for locks. Whoever comes second sees
the other. Locks end with their process, so a dead puller keeps nothing.

One arena per incarnation of a worker. A successor takes over the arenas of dead predecessors: it
serves the shards that have a ticket, gives all else back to the system, and puts nothing new there.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import threading
import weakref
from bisect import bisect_left, insort_left
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from areal_sc.errors import ProtocolError, StoreFull, TransportError
from areal_sc.transport.shards.arena import Arena, block_path, block_span
from areal_sc.transport.shards.layout import ShardLayout
from areal_sc.transport.shards.mapped_file import map_file
from areal_sc.transport.shards.memory_folder import ArenaFolder
from areal_sc.transport.shards.store import ShardKey, StoreBackend, StoreBlock

IDLE_SWEEPS: Final = 8
"""A block that was free for so many sweeps is deleted: what comes and goes with every training step
finds its memory in place, and a burst does not keep its own for ever."""

MAX_REUSE_RATIO: Final = 2
"""A shard takes no block that is larger than its own size by more than this."""

_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _BlockFile:
    """A mapped file; `freed_at` is the number of sweeps before it was given back."""

    name: str
    memory: NDArray[np.uint8]
    freed_at: int = 0


class Block(StoreBlock):
    """A file of an arena in the hands of a store, until it is free again.

    Args:
        backend: where it is given back.
        layout: of the shard, which begins at byte `start`.
        sequence: number of the shard, when it is sealed already.
    """

    def __init__(
        self,
        backend: ArenaBackend,
        arena: Arena,
        file: _BlockFile,
        layout: ShardLayout,
        start: int,
        sequence: int | None = None,
    ) -> None:
        self.arena = arena
        self.file = file
        self.sequence = sequence
        self._backend = backend
        # every view of the shard refers to this array, so the end of the last one is its end
        array = file.memory[start : start + layout.num_bytes]
        super().__init__(layout, array.data)
        self._viewed = weakref.ref(array)

    def seal(self, sequence: int) -> None:
        """Lets other processes find the shard by its number.

        Raises: StoreFull: no room for the ticket. TransportError: it cannot be written.
        """
        try:
            self.arena.link(sequence, self.file.name)
        except OSError as error:
            raise _storage_error(self.arena, 0, error) from error
        self.sequence = sequence

    def free(self) -> None:
        """Gives the block back, sealed or not; it is reused once nobody reads it."""
        if self.sequence is not None:
            self.arena.delete(str(self.sequence))
        self.memory = memoryview(b"")
        self._backend.retire(self)

    @property
    def is_read(self) -> bool:
        """It was freed, but is still viewed in this process or locked by a puller."""
        if self._viewed() is not None:
            return True
        return self.sequence is not None and self.arena.locks.is_locked_elsewhere(self.sequence)


class ArenaBackend(StoreBackend):
    """A store's memory in files that all processes of the node can map. Safe across threads.

    Args:
        folder: the arenas of the run; closed after the backend.
        worker: name of the worker.
        incarnation: this life of it.

    Raises: TransportError: the arena cannot be made.
    """

    def __init__(self, folder: ArenaFolder, worker: str, incarnation: str) -> None:
        self._folder = folder
        self._worker = worker
        self._arena = folder.create(worker, incarnation)
        self._lock = threading.Lock()
        self._adopted: dict[Arena, int] = {}  # the number of blocks in it
        self._free: list[_BlockFile] = []  # by size
        self._retired: list[Block] = []
        self._num_files = 0
        self._num_sweeps = 0

    def allocate(self, layout: ShardLayout, spare_bytes: int = 0) -> Block:
        """A block to be filled and sealed.

        Args:
            spare_bytes: the folder must have so much free room beside a new block.
        Raises: StoreFull: the folder has no room. TransportError: it cannot be used.
        """
        self._check_owned()
        header = layout.header()
        span = block_span(len(header) + layout.num_bytes)
        file = self._take(span)
        if file is None:
            try:
                file = self._new_file(span, spare_bytes)
            except OSError as error:
                raise _storage_error(self._arena, span, error) from error
        file.memory[: len(header)] = np.frombuffer(header, np.uint8)
        return Block(self, self._arena, file, layout, len(header))

    def retire(self, block: Block) -> None:
        """Takes a freed block, which may still be read."""
        with self._lock:
            self._retired.append(block)
            self.retired_bytes += block.layout.counted_bytes
            self._reclaim([block])

    def reclaim(self) -> None:
        """Takes back the blocks that nobody reads any more."""
        with self._lock:
            self._reclaim(self._retired)

    def end_sweep(self) -> None:
        """Reclaims, and returns to the system what was not needed lately."""
        with self._lock:
            self._reclaim(self._retired)
            self._num_sweeps += 1
            unused_since = self._num_sweeps - IDLE_SWEEPS
            idle = [file for file in self._free if file.freed_at <= unused_since]
            self._free = [file for file in self._free if file.freed_at > unused_since]
        for file in idle:
            self._arena.delete(file.name)

    def adopt(self) -> dict[ShardKey, StoreBlock]:
        """Takes over the arenas of dead predecessors; returns their sealed shards."""
        self._check_owned()
        shards: dict[ShardKey, StoreBlock] = {}
        for arena in self._folder.take_over(self._worker):
            shards |= self._adopt_arena(arena)
        return shards

    def close(self) -> None:
        """Deletes the own arena and the adopted ones. Views that are left stay readable."""
        with self._lock:
            arenas = [self._arena, *self._adopted]
            self._adopted, self._free, self._retired = {}, [], []
        for arena in arenas:
            arena.remove()

    def _take(self, span: int) -> _BlockFile | None:
        """The smallest free block that fits; retired blocks are looked at when none does."""
        with self._lock:
            for reclaims in (False, True):
                if reclaims:
                    self._reclaim(self._retired)
                place = bisect_left(self._free, span, key=_size)
                if place < len(self._free) and _size(self._free[place]) <= MAX_REUSE_RATIO * span:
                    return self._free.pop(place)
        return None

    def _new_file(self, span: int, spare_bytes: int) -> _BlockFile:
        """A block whose space is reserved: writing to it cannot fail later. Raises: OSError."""
        if spare_bytes and self._arena.free_bytes < span + spare_bytes:
            raise OSError(errno.ENOSPC, f"{spare_bytes} bytes are to be left to others")
        with self._lock:
            self._num_files += 1
            name = f"block-{self._num_files}"
        try:
            self._arena.reserve(name, span)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            with self._lock:
                unused, self._free = self._free, []
            for file in unused:
                self._arena.delete(file.name)
            self._arena.reserve(name, span)
        try:
            return _BlockFile(name, map_file(self._arena.file_path(name), writable=True))
        except OSError:
            self._arena.delete(name)
            raise

    def _reclaim(self, blocks: list[Block]) -> None:
        """Frees the blocks among these retired ones that nobody reads any more."""
        for block in [block for block in blocks if not block.is_read]:
            self._retired.remove(block)
            self.retired_bytes -= block.layout.counted_bytes
            if block.arena is self._arena:
                block.file.freed_at = self._num_sweeps
                insort_left(self._free, block.file, key=_size)
            elif block.arena in self._adopted:
                block.arena.delete(block.file.name)
                self._adopted[block.arena] -= 1
                if not self._adopted[block.arena]:
                    del self._adopted[block.arena]
                    block.arena.remove()

    def _adopt_arena(self, arena: Arena) -> dict[ShardKey, Block]:
        """The shards of an arena that was taken over; its other files are deleted.

        Pullers that have mapped one of those keep its memory: shards that were swept before their
        owner died.
        """
        shards = {}
        used = set()
        for sequence in arena.sequences():
            try:
                path = block_path(str(arena.path), sequence)
                memory = map_file(path, writable=False)
                layout, start = ShardLayout.behind_header(memory.data)
            except (ProtocolError, OSError) as error:
                why = str(error)  # the error itself would keep what these frames see
                logger.warning("shard %s.%d is lost: %s", arena.incarnation, sequence, why)
                arena.delete(str(sequence))
                continue
            file = _BlockFile(os.path.basename(path), memory)
            used.add(file.name)
            block = Block(self, arena, file, layout, start, sequence)
            shards[arena.incarnation, sequence] = block
        for name in arena.block_names() - used:
            arena.delete(name)
        if shards:
            with self._lock:
                self._adopted[arena] = len(shards)
        else:
            arena.remove()
        return shards

    def _check_owned(self) -> None:
        if not self._arena.is_owned:
            raise TransportError(
                f"the arena {self._arena.path} was closed, or belongs to the process that "
                "this one was forked from"
            )


def _size(file: _BlockFile) -> int:
    return file.memory.size


def _storage_error(arena: Arena, num_bytes: int, error: OSError) -> TransportError:
    """What a failure of the file system means to the user of a store."""
    if error.errno not in _NO_ROOM:
        return TransportError(f"the arena {arena.path} cannot be used: {error.strerror}")
    if error.errno == errno.EFBIG:
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        return StoreFull(
            f"the arena {arena.path} cannot take {num_bytes} bytes more: no file may be larger "
            f"than {limit} bytes here; raise that limit (ulimit -f unlimited)"
        )
    with suppress(OSError):
        space = os.statvfs(arena.path)
        return StoreFull(
            f"the arena {arena.path} cannot take {num_bytes} bytes more ({error.strerror}): its "
            f"file system has {space.f_bavail * space.f_frsize} of "
            f"{space.f_blocks * space.f_frsize} bytes free; enlarge it (/dev/shm in Docker: "
            "--shm-size), or choose another folder (transport.shared_memory)"
        )
    return TransportError(f"the arena {arena.path} cannot be used: {error.strerror}")
