"""The payload of one reply, on its way from the wire to its destinations.

    frame    a share of one destination     received in place, then its tag is checked
             more than one destination      received in a buffer, checked, copied
             encrypted                      received in a buffer, decrypted to its place

Bytes may lie at their destination before their tag was found right: a pull hands nothing out until
all of its replies were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.wire import TAG_BYTES, Sealer


class Arrival:
    """Frames are announced (`place`) and received (`on_frame`) in turn; then `finish`.

    Args:
        sealer: of the direction that the reply came.
        sequence: number of the reply.
        tags: that the reply's header names for its frames, as it came.
        destinations: are filled one after the other.
        pool: gives buffers.
    """

    def __init__(
        self,
        sealer: Sealer,
        sequence: int,
        tags: Any,
        destinations: Iterable[memoryview],
        pool: BufferPool,
    ) -> None:
        self._sealer = sealer
        self._sequence = sequence
        self._pool = pool
        self._destinations = deque(room for room in destinations if len(room))
        self._missing = sum(map(len, self._destinations))
        self._num_frames = 0
        self._frame = memoryview(b"")
        self._is_in_place = False
        self._tags: list[Any] = tags if isinstance(tags, list) else []

    def place(self, num_bytes: int) -> memoryview:
        """Where the next frame goes.

        Raises: ProtocolError: it is not part of this reply.
        """
        size = num_bytes - TAG_BYTES if self._sealer.is_encrypted else num_bytes
        if not 0 <= size <= self._missing:
            raise ProtocolError(f"expected {self._missing} more bytes of payload, got {size}")
        self._missing -= size
        self._is_in_place = not self._sealer.is_encrypted and self._fits(size)
        if self._is_in_place:
            self._frame = self._take(size)
        else:
            self._frame = self._pool.take(num_bytes).data
        return self._frame

    def on_frame(self) -> None:
        """Checks the frame and puts it where it belongs.

        Raises: ProtocolError: its tag is wrong or missing.
        """
        number, frame = self._num_frames + 1, self._frame
        self._num_frames, self._frame = number, memoryview(b"")
        if self._sealer.is_encrypted:
            size = len(frame) - TAG_BYTES
            if self._fits(size):
                self._sealer.decrypt_frame(self._sequence, number, frame, self._take(size))
            else:
                plain = self._pool.take(size).data
                self._sealer.decrypt_frame(self._sequence, number, frame, plain)
                self._scatter(plain)
            return
        tag = self._tags[number - 1] if number <= len(self._tags) else None
        self._sealer.check_frame(self._sequence, number, frame, tag)
        if not self._is_in_place:
            self._scatter(frame)

    def finish(self) -> None:
        """Raises: ProtocolError: the reply's payload ended too early."""
        if self._missing:
            raise ProtocolError(f"{self._missing} bytes of payload are missing")

    def _fits(self, size: int) -> bool:
        """A frame of that size belongs to one destination alone."""
        return bool(self._destinations) and size <= len(self._destinations[0])

    def _take(self, size: int) -> memoryview:
        """The next bytes of the first destination."""
        room = self._destinations.popleft()
        if size < len(room):
            self._destinations.appendleft(room[size:])
        return room[:size]

    def _scatter(self, frame: memoryview) -> None:
        while len(frame):
            size = min(len(frame), len(self._destinations[0]))
            self._take(size)[:] = frame[:size]
            frame = frame[size:]
