"""The payload of one reply, on its way from the wire to its destinations.

    authenticated    received at its destinations, however many, then its tag is checked there
    encrypted        received in a buffer, then decrypted to its destination

Bytes may lie at their destination before their tag was found right: a pull hands nothing out until
all of its replies were.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.wire import TAG_BYTES, Sealer


class Arrival:
    """Frames are announced (`places`) and received (`on_frame`) in turn; then `finish`.

    Args:
        sealer: of the direction that the reply came.
        sequence: number of the reply.
        destinations: are filled one after the other.
        pool: gives buffers.
    """

    def __init__(
        self,
        sealer: Sealer,
        sequence: int,
        destinations: Iterable[memoryview],
        pool: BufferPool,
    ) -> None:
        self._sealer = sealer
        self._sequence = sequence
        self._pool = pool
        self._destinations = deque(room for room in destinations if len(room))
        self._missing = sum(map(len, self._destinations))
        self._num_frames = 0
        self._frame: list[memoryview] = []
        self._tag = bytearray(TAG_BYTES)

    def places(self, num_bytes: int) -> list[memoryview]:
        """Where the next frame goes, one after the other.

        Raises: ProtocolError: it is not part of this reply.
        """
        size = num_bytes - TAG_BYTES
        if not 0 <= size <= self._missing:
            raise ProtocolError(f"expected {self._missing} more bytes of payload, got {size}")
        self._missing -= size
        if self._sealer.is_encrypted:
            self._frame = [self._pool.take(num_bytes).data]
            return self._frame
        self._frame = list(self._take(size))
        return [*self._frame, memoryview(self._tag)]

    def on_frame(self) -> None:
        """Checks the frame and puts it where it belongs.

        Raises: ProtocolError: its tag is wrong.
        """
        self._num_frames += 1
        number, frame, self._frame = self._num_frames, self._frame, []
        if not self._sealer.is_encrypted:
            self._sealer.check_frame(self._sequence, number, frame, bytes(self._tag))
            return
        size = len(frame[0]) - TAG_BYTES
        places = list(self._take(size))
        plain = places[0] if len(places) == 1 else self._pool.take(size).data
        self._sealer.decrypt_frame(self._sequence, number, frame[0], plain)
        if len(places) != 1:
            for place in places:
                place[:], plain = plain[: len(place)], plain[len(place) :]

    def finish(self) -> None:
        """Raises: ProtocolError: the reply's payload ended too early."""
        if self._missing:
            raise ProtocolError(f"{self._missing} bytes of payload are missing")

    def _take(self, size: int) -> Iterator[memoryview]:
        """The next bytes of the destinations."""
        while size:
            room = self._destinations.popleft()
            if size < len(room):
                self._destinations.appendleft(room[size:])
                room = room[:size]
            size -= len(room)
            yield room
