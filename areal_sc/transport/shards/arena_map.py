"""The reader's side of shared memory: shards of workers on this node, mapped and not copied.

    open_shard   lock the shard's number -> is its ticket still there? -> a view of the block
    dropped      when the shard and every tensor made of it are gone, the number is unlocked

`blocks.py` says why the block of a locked shard with a ticket is never reused. The owner may be
dead: what it sealed stays, until its successor or the end of the run deletes it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from areal_sc.errors import ShardGone, TransportError
from areal_sc.transport.shards.arena import block_path, readers_path
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.transport.shards.layout import SealedField, ShardLayout
from areal_sc.transport.shards.mapped_file import ShardLocks, map_file
from areal_sc.transport.shards.memory_folder import ArenaFolder

LOOK_AGAIN_S: Final = 1.0
"""Time for which a missing arena is not looked for again, and memory that is gone stays mapped."""
MAX_SEQUENCE: Final = 1 << 62
"""Shards have smaller numbers; the kernel could not lock larger ones."""


class MappedShard:
    """A sealed shard in the memory of the process that wrote it.

    The memory is read-only: writing to a tensor or view of it is a segmentation fault, which no
    flag of torch can announce. It stays valid, and the block is not reused, as long as this object
    or anything made from it is alive, whatever becomes of the shard and its owner.
    """

    def __init__(self, layout: ShardLayout, memory: NDArray[np.uint8]) -> None:
        self._layout = layout
        self._memory = memory

    @cached_property
    def fields(self) -> Mapping[str, SealedField]:
        """The fields by name, to copy rows from."""
        return self._layout.over(self._memory.data.toreadonly())

    def tensor(self, name: str) -> torch.Tensor:
        """[T] all values of one of the fields, not copied, read-only."""
        return self._layout.fields[name].tensor_in(self._memory)


@dataclass(frozen=True, slots=True)
class _Hold:
    """A lock on a shard, as long as the array over it is alive."""

    locks: ShardLocks
    layout: ShardLayout
    shard: weakref.ref[NDArray[np.uint8]]


class ArenaMap:
    """The arenas of a run on this node, for reading. Safe to use from several threads.

    Args:
        folder: the arenas of the run; closed after the map.
        clock: seconds, monotonic.
    """

    def __init__(self, folder: ArenaFolder, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder = folder
        self._clock = clock
        # one thread may take it twice: the garbage collector runs `_on_dropped` anywhere
        self._lock = threading.RLock()
        self._arenas: dict[str, str] = {}
        self._listed_s = self._trimmed_s = -LOOK_AGAIN_S
        self._locks: dict[str, ShardLocks] = {}
        self._blocks: dict[str, NDArray[np.uint8]] = {}
        self._holds: dict[tuple[str, int], _Hold] = {}
        os.register_at_fork(after_in_child=partial(_start_over, weakref.ref(self)))

    def find(self, incarnation: str) -> bool:
        """An arena of that incarnation is on this node; one made just now may be missed."""
        with self._lock:
            self._forget_deleted()
            return self._find(incarnation) is not None

    def open_shard(self, shard_id: str) -> MappedShard:
        """Maps a shard, whatever its size, without reading it.

        Raises:
            ShardGone: it was swept, or no arena of its owner is on this node.
            MetadataError: it is no shard id.
            ProtocolError: its ticket or header cannot be understood.
            TransportError: it cannot be mapped, for example for want of file descriptors.
        """
        incarnation, sequence = parse_shard_id(shard_id)
        with self._lock:
            arena = self._find(incarnation)
            if arena is None or sequence >= MAX_SEQUENCE:
                raise ShardGone(f"shard {shard_id} is gone: no arena on this node has it")
            try:
                return self._open(arena, sequence)
            except FileNotFoundError:
                raise ShardGone(
                    f"shard {shard_id} is gone: it was swept, or its owner has ended"
                ) from None
            except OSError as error:
                raise TransportError(
                    f"shard {shard_id} cannot be mapped: {error.strerror}"
                ) from error

    def close(self) -> None:
        """Forgets all. What is still mapped stays valid and locked until it is dropped."""
        with self._lock:
            self._arenas, self._locks = {}, {}
            self._blocks.clear()

    def _find(self, incarnation: str) -> str | None:
        found = self._arenas.get(incarnation)
        now = self._clock()
        if found is None and now - self._listed_s >= LOOK_AGAIN_S:
            self._arenas = self._folder.by_incarnation()
            self._listed_s = now
            found = self._arenas.get(incarnation)
        return found

    def _open(self, arena: str, sequence: int) -> MappedShard:
        key = arena, sequence
        hold = self._holds.get(key)
        shard = None if hold is None else hold.shard()
        if hold is not None and shard is not None:
            block_path(arena, sequence)  # it may have been swept meanwhile
            return MappedShard(hold.layout, shard)
        self._holds.pop(key, None)  # news of its end that are still to come unlock nothing
        locks = self._locks.get(arena)
        if locks is None:
            locks = self._locks[arena] = ShardLocks(readers_path(arena))
        locks.lock(sequence)
        try:
            block = self._block(block_path(arena, sequence))
            layout, start = ShardLayout.behind_header(block.data)
        except BaseException:
            locks.unlock(sequence)
            raise
        shard = block[start : start + layout.num_bytes]
        hold = self._holds[key] = _Hold(locks, layout, weakref.ref(shard))
        weakref.finalize(shard, self._on_dropped, key, hold).atexit = False
        return MappedShard(layout, shard)

    def _block(self, path: str) -> NDArray[np.uint8]:
        if path not in self._blocks:
            self._blocks[path] = map_file(path, writable=False)
        return self._blocks[path]

    def _forget_deleted(self) -> None:
        """Lets go of blocks whose file was deleted; views of them keep their memory."""
        now = self._clock()
        if now - self._trimmed_s >= LOOK_AGAIN_S:
            self._trimmed_s = now
            for path in [path for path in self._blocks if not os.path.exists(path)]:
                del self._blocks[path]
            for arena in [arena for arena in self._locks if not os.path.exists(arena)]:
                del self._locks[arena]

    def _on_dropped(self, key: tuple[str, int], hold: _Hold) -> None:
        """The last view of a shard is gone; runs in any thread, and within any other code."""
        with self._lock:
            if self._holds.get(key) is hold:  # else the shard was opened again meanwhile
                del self._holds[key]
                hold.locks.unlock(key[1])

    def _start_over(self) -> None:
        """A child of a fork closes its copies of the locks, which would outlive the parent."""
        for locks in (*self._locks.values(), *(hold.locks for hold in self._holds.values())):
            locks.close()
        self._lock = threading.RLock()
        self._locks, self._holds = {}, {}
        self._blocks.clear()


def _start_over(arena_map: weakref.ref[ArenaMap]) -> None:
    alive = arena_map()
    if alive is not None:
        alive._start_over()
