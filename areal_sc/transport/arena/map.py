"""The reader's side of shared memory: shards of workers on this node, mapped and not copied.

    open_shard   ticket -> lock the block -> is the ticket still there? -> a view of the block
    dropped      when the shard and every tensor made of it are gone, the block is unlocked

`arena_blocks.py` says why a locked block with a ticket is never reused. The owner may be dead: what
it sealed stays, until its successor or the end of the run deletes it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.arena.files import segment_path, ticket_path
from areal_sc.transport.arena.folder import ArenaFolder
from areal_sc.transport.arena.memory import MappedFile
from areal_sc.transport.shard_ids import parse_shard_id
from areal_sc.transport.shard_layout import SealedField, ShardLayout, Ticket
from areal_sc.transport.tensor_bytes import dtype_named

LOOK_AGAIN_S: Final = 1.0
"""So long a missing arena is believed to be missing, and memory that is gone is kept mapped."""
MAX_CACHED_TICKETS: Final = 4096
MAX_TICKET_BYTES: Final = 64 << 20


class MappedShard:
    """A sealed shard in the memory of the process that wrote it.

    The memory is read-only: writing to a tensor or view of it is a segmentation fault, which no
    flag of torch can announce. It stays valid, and the block is not reused, as long as this object
    or anything made from it is alive, whatever becomes of the shard and its owner.

    Attributes:
        shard_id: its name.
    """

    def __init__(self, shard_id: str, layout: ShardLayout, block: NDArray[np.uint8]) -> None:
        self.shard_id = shard_id
        self._layout = layout
        self._block = block

    @property
    def num_bytes(self) -> int:
        """Bytes of all fields, with the gaps between them."""
        return self._layout.num_bytes

    @cached_property
    def fields(self) -> Mapping[str, SealedField]:
        """The fields by name, to copy rows from."""
        return self._layout.over(self._block.data.toreadonly())

    def tensor(self, name: str) -> torch.Tensor:
        """[T] all values of a field, not copied, read-only.

        Raises: MetadataError: the shard has no such field.
        """
        field = self._layout.fields.get(name)
        if field is None:
            held = list(self._layout.fields)
            raise MetadataError(f"shard {self.shard_id} has fields {held}, not {name!r}")
        dtype = dtype_named(field.dtype)
        num_bytes = field.row_bounds[-1]
        if not num_bytes:
            return torch.empty(0, dtype=dtype)
        count = num_bytes // dtype.itemsize
        return torch.frombuffer(self._block, dtype=dtype, count=count, offset=field.start)


_Key: TypeAlias = tuple[str, int]
"""Incarnation and sequence number: one shard, however its id was spelled."""


@dataclass(frozen=True, slots=True)
class _Place:
    """What a ticket says, remembered without any claim that it still holds."""

    ticket_path: str
    segment_path: str
    ticket: Ticket


@dataclass(frozen=True, slots=True)
class _Hold:
    """A lock on a block, as long as the array over the block is alive."""

    file: MappedFile
    ticket: Ticket
    block: weakref.ref[NDArray[np.uint8]]


class ArenaMap:
    """The arenas of a run on this node, for reading. Safe to use from several threads.

    Args:
        folder: the arenas of the run; closed after the map.
        clock: seconds, monotonic.
    """

    def __init__(self, folder: ArenaFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        self._lock = threading.Lock()
        self._arenas: dict[str, str] = {}
        self._listed_s = self._trimmed_s = -LOOK_AGAIN_S
        self._places: OrderedDict[_Key, _Place] = OrderedDict()
        self._files: dict[str, MappedFile] = {}
        self._holds: dict[_Key, _Hold] = {}
        self._dropped: deque[tuple[_Key, _Hold]] = deque()
        os.register_at_fork(after_in_child=partial(_start_over, weakref.ref(self)))

    def find(self, incarnation: str) -> bool:
        """An arena of that incarnation is on this node; one made just now may be missed."""
        with self._lock:
            self._forget_unlinked()
            return self._find(incarnation) is not None

    def open_shard(self, shard_id: str) -> MappedShard:
        """Maps a shard, whatever its size, without reading it.

        Raises:
            ShardGone: it was swept, or no arena of its owner is on this node.
            MetadataError: it is no shard id.
            ProtocolError: its ticket cannot be understood.
            TransportError: it cannot be mapped, for example for want of file descriptors.
        """
        incarnation, sequence = parse_shard_id(shard_id)
        try:
            with self._lock:
                self._unlock_dropped()
                self._forget_unlinked()
                return self._open(shard_id, (incarnation, sequence))
        except OSError as error:
            raise TransportError(f"shard {shard_id} cannot be mapped: {error.strerror}") from error
        finally:
            self._release_dropped()

    def close(self) -> None:
        """Forgets all. What is still mapped stays valid and locked until it is dropped."""
        with self._lock:
            self._arenas, self._files = {}, {}
            self._places.clear()
        self._release_dropped()

    def _find(self, incarnation: str) -> str | None:
        found = self._arenas.get(incarnation)
        now = self._clock()
        if found is None and now - self._listed_s >= LOOK_AGAIN_S:
            self._arenas = self._folder.by_incarnation()
            self._listed_s = now
            found = self._arenas.get(incarnation)
        return found

    def _open(self, shard_id: str, key: _Key) -> MappedShard:
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = self._read_ticket(shard_id, key)
            if len(self._places) > MAX_CACHED_TICKETS:
                self._places.popitem(last=False)
        else:
            self._places.move_to_end(key)
            # with its ticket there nobody else's block overlaps this one, so that a lock which is
            # taken back below, or has just been dropped, is this shard's alone
            self._check_ticket(shard_id, key, place)
        hold = self._holds.get(key)
        block = None if hold is None else hold.block()
        if block is None:
            block = self._hold(shard_id, key, place)
        return MappedShard(shard_id, place.ticket.layout, block)

    def _hold(self, shard_id: str, key: _Key, place: _Place) -> NDArray[np.uint8]:
        """The array over a block, which is locked until the last view of the array is gone."""
        ticket = place.ticket
        file = self._file(shard_id, place.segment_path)
        if ticket.start + ticket.span > file.num_bytes:
            raise ProtocolError(
                f"shard {shard_id}: its ticket names bytes {ticket.start} to "
                f"{ticket.start + ticket.span} of a segment of {file.num_bytes}"
            )
        file.lock(ticket.start, ticket.span)
        try:
            self._check_ticket(shard_id, key, place)
        except ShardGone:
            self._holds.pop(key, None)
            file.unlock(ticket.start, ticket.span)
            raise
        block = file.memory[ticket.start : ticket.start + ticket.span]
        hold = self._holds[key] = _Hold(file, ticket, weakref.ref(block))
        weakref.finalize(block, self._on_dropped, key, hold).atexit = False
        return block

    def _read_ticket(self, shard_id: str, key: _Key) -> _Place:
        incarnation, sequence = key
        arena = self._find(incarnation)
        if arena is None or sequence >= 1 << 63:
            raise ShardGone(f"shard {shard_id} is gone: no arena on this node has it")
        path = ticket_path(arena, sequence)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise _swept(shard_id) from None
        try:
            num_bytes = os.fstat(fd).st_size
            if num_bytes > MAX_TICKET_BYTES:
                raise ProtocolError(f"shard {shard_id}: its ticket has {num_bytes} bytes")
            ticket = Ticket.from_bytes(os.read(fd, num_bytes))
        finally:
            os.close(fd)
        return _Place(path, segment_path(arena, ticket.segment), ticket)

    def _check_ticket(self, shard_id: str, key: _Key, place: _Place) -> None:
        if not os.access(place.ticket_path, os.F_OK):
            del self._places[key]
            raise _swept(shard_id)

    def _file(self, shard_id: str, path: str) -> MappedFile:
        file = self._files.get(path)
        if file is None:
            try:
                file = self._files[path] = MappedFile(path, writable=False)
            except FileNotFoundError:
                raise _swept(shard_id) from None
        return file

    def _forget_unlinked(self) -> None:
        """Lets go of segments that were deleted; views of them keep their memory."""
        now = self._clock()
        if now - self._trimmed_s >= LOOK_AGAIN_S:
            self._trimmed_s = now
            unlinked = [path for path, file in self._files.items() if file.is_unlinked]
            for path in unlinked:
                del self._files[path]

    def _on_dropped(self, key: _Key, hold: _Hold) -> None:
        """The last view of a block is gone; runs in any thread, and within any other code."""
        self._dropped.append((key, hold))
        self._release_dropped()

    def _release_dropped(self) -> None:
        """Unlocks what was dropped, unless somebody holds the lock, who then does it afterwards.

        Waiting for the lock could wait for ever: the garbage collector may call this in the very
        thread that holds it.
        """
        while self._dropped and self._lock.acquire(blocking=False):
            try:
                self._unlock_dropped()
            finally:
                self._lock.release()

    def _unlock_dropped(self) -> None:
        while self._dropped:
            key, hold = self._dropped.popleft()
            if self._holds.get(key) is hold:  # else the shard was opened again meanwhile
                del self._holds[key]
                hold.file.unlock(hold.ticket.start, hold.ticket.span)

    def _start_over_in_child(self) -> None:
        """A child of a fork closes its copies of the locks, which would outlive the parent."""
        for file in (*self._files.values(), *(hold.file for hold in self._holds.values())):
            file.close()
        self._lock = threading.Lock()
        self._files, self._holds = {}, {}
        self._places.clear()
        self._dropped.clear()


def _start_over(arena_map: weakref.ref[ArenaMap]) -> None:
    alive = arena_map()
    if alive is not None:
        alive._start_over_in_child()


def _swept(shard_id: str) -> ShardGone:
    return ShardGone(f"shard {shard_id} is gone: it was swept, or its owner has ended")
