"""The replies of one session, taken apart as they arrive.

    header      opened here, which tells to which request it belongs
    payload     received at the destinations of that request, each frame's tag checked
    the end     only now the reply counts; one with a fault is read to its end, too

What a faulty reply has written at its destinations is not used: its request fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.arrival import Arrival
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import SessionGrant
from areal_sc.transport.bulk.wire import (
    MAX_REPLY_HEADER_BYTES,
    TAG_BYTES,
    Sealer,
    parse_head,
)


@dataclass(eq=False, slots=True)
class Reply:
    """What came.

    Attributes:
        sequence: number of the request that it answers; 0: of none that waits.
        body: what the owner says; [0, ...] where it is not a failure.
        error: what is wrong with it.
    """

    sequence: int = 0
    body: Any = None
    error: ProtocolError | None = None


class ReplyReader:
    """A `FrameSink`.

    Args:
        grant: of the session.
        max_payload_bytes: of a frame; a larger one ends the connection.
        pool: gives buffers.
        destinations: of the payload that a request asked for; raises ProtocolError where no
            request of that number waits.
        on_reply: takes each reply when all of it is there.
        on_lost: as `FrameSink.on_lost`.

    Attributes:
        received_bytes: of all frames.
    """

    def __init__(
        self,
        grant: SessionGrant,
        max_payload_bytes: int,
        pool: BufferPool,
        *,
        destinations: Callable[[int], Iterable[memoryview]],
        on_reply: Callable[[Reply], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self.received_bytes = 0
        self._session_id = grant.session_id
        self._sealer = Sealer(grant.session_id, grant.reply_key, grant.is_encrypted)
        self._max_frame_bytes = max_payload_bytes + TAG_BYTES
        self._pool = pool
        self._destinations = destinations
        self._on_reply = on_reply
        self._on_lost = on_lost
        self._header = memoryview(b"")
        self._reply: Reply | None = None  # that is being received
        self._payload: Arrival | None = None

    def places(self, num_bytes: int) -> list[memoryview]:
        """Where the next frame goes; raises as `FrameSink.places`."""
        self.received_bytes += num_bytes
        if self._reply is None:
            if not 0 < num_bytes <= MAX_REPLY_HEADER_BYTES:
                raise ProtocolError(f"a reply's header of {num_bytes} bytes")
            self._header = memoryview(bytearray(num_bytes))
            return [self._header]
        if self._payload is not None and self._reply.error is None:
            try:
                return self._payload.places(num_bytes)
            except ProtocolError as error:
                self._reply.error = error
        if num_bytes > self._max_frame_bytes:
            raise ProtocolError(f"a frame of {num_bytes} bytes: more than was asked for")
        return [self._pool.take(num_bytes).data] if num_bytes else []

    def on_frame(self, *, has_more: bool) -> None:
        """A reply's header, or a frame of its payload, has arrived."""
        if self._reply is None:
            self._reply = self._begin()
        elif self._payload is not None and self._reply.error is None:
            try:
                self._payload.on_frame()
            except ProtocolError as error:
                self._reply.error = error
        if not has_more:
            self._end(self._reply)

    def on_lost(self, reason: str) -> None:
        """No more replies come."""
        self._on_lost(reason)

    def _begin(self) -> Reply:
        reply = Reply()
        try:
            session_id, sequence = parse_head(self._header, MAX_REPLY_HEADER_BYTES)
            if session_id != self._session_id:
                raise ProtocolError("a reply of another session")
            wanted = self._destinations(sequence)
            reply.sequence = sequence
            body = reply.body = self._sealer.open_header(self._header, sequence)
            is_success = isinstance(body, list) and body[:1] == [0]
            self._payload = Arrival(
                self._sealer, sequence, wanted if is_success else [], self._pool
            )
        except ProtocolError as error:
            reply.error = error
        return reply

    def _end(self, reply: Reply) -> None:
        payload, self._payload, self._reply = self._payload, None, None
        if payload is not None and reply.error is None:
            try:
                payload.finish()
            except ProtocolError as error:
                reply.error = error
        self._on_reply(reply)
