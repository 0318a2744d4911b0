"""One connection of a puller to an owner: requests go out, and replies come to their places.

consumes     requests, within credit; replies
waits for    the owner
unblocked by its replies, or the end of the connection
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import BulkOptions, SessionGrant
from areal_sc.transport.bulk.request_queue import Asked, DescribeJob
from areal_sc.transport.bulk.stream import MessageStream, framed
from areal_sc.transport.bulk.wire import (
    MAX_REPLY_BYTES,
    MAX_REPLY_HEADER_BYTES,
    Found,
    Hello,
    Reply,
    Request,
    Sealer,
    decoded_reply,
    parse_head,
)

MAX_REQUESTS: Final = 16
"""Outstanding at one owner: small pulls beyond share a request."""


class ReplyTaker(Protocol):
    """What becomes of the replies; called on the event loop."""

    def on_reply(self, asked: Asked | DescribeJob, reply: Reply) -> None:
        """All of it was verified, and its payload is in its places.

        Raises: ProtocolError: it does not answer what was asked.
        """
        ...

    def on_fault(self, asked: Asked | DescribeJob | None, error: ProtocolError) -> None:
        """No correct owner has sent it; None: nobody knows what it answers."""
        ...

    def on_lost(self, reason: str) -> None:
        """Nothing more comes."""
        ...


@dataclass(eq=False, slots=True)
class _Arrival:
    """A reply that is being received.

    Attributes:
        asked: what it answers.
        error: what is wrong with it.
        places: where its payload goes, in turn.
        buffer: where it is received, if it must not go there as it is.
    """

    sequence: int
    header: memoryview
    asked: Asked | DescribeJob
    reply: Reply | None = None
    error: ProtocolError | None = None
    places: Sequence[memoryview] = ()
    buffer: memoryview | None = None


class Session:
    """A `MessageSink`; shows itself to the owner at once.

    Args:
        connection: to the owner; owned from here on.
        grant: what the owner has given us.
        options: how to ask.
        pool: gives buffers.
        taker: of the replies.

    Attributes:
        inflight: what was asked and not answered yet, by sequence number.
        stream: the connection; who closes it hears nothing more.
    """

    def __init__(
        self,
        connection: socket.socket,
        grant: SessionGrant,
        options: BulkOptions,
        pool: BufferPool,
        taker: ReplyTaker,
    ) -> None:
        self.inflight: dict[int, Asked | DescribeJob] = {}
        self._inflight_bytes = 0
        self._session_id = grant.session_id
        self._options = options
        self._pool = pool
        self._taker = taker
        self._sequence = itertools.count(1)
        self._requests = Sealer(grant.session_id, grant.request_key, grant.is_encrypted)
        self._replies = Sealer(grant.session_id, grant.reply_key, grant.is_encrypted, pool)
        self._arrival: _Arrival | None = None
        self.stream = MessageStream(
            connection,
            self,
            max_header_bytes=MAX_REPLY_HEADER_BYTES,
            window_bytes=options.inflight_bytes,
        )
        hello, _ = self._requests.seal(next(self._sequence), Hello())
        self.stream.send(lambda: framed(hello))

    @property
    def has_credit(self) -> bool:
        room = self._options.inflight_bytes - self._inflight_bytes
        return len(self.inflight) < MAX_REQUESTS and room >= self._options.chunk_bytes

    def ask(self, request: Request, asked: Asked | DescribeJob) -> None:
        """Sends a request. Raises: ProtocolError: it holds what no message can."""
        sequence = next(self._sequence)
        header, _ = self._requests.seal(sequence, request)
        self.inflight[sequence] = asked
        self._inflight_bytes += _num_bytes(asked)
        self.stream.send(lambda: framed(header))

    def on_header(self, header: memoryview, payload_bytes: int) -> Sequence[memoryview]:
        """Finds what a reply answers, and where its payload goes.

        A faulty reply is read to its end, too: its request fails, and the session goes on.
        """
        if payload_bytes > MAX_REPLY_BYTES:
            raise ProtocolError(f"a payload of {payload_bytes} bytes: more than can be asked for")
        try:
            session_id, sequence = parse_head(header, MAX_REPLY_HEADER_BYTES)
            if session_id != self._session_id:
                raise ProtocolError("a reply of another session")
            if sequence not in self.inflight:
                raise ProtocolError(f"reply {sequence} answers nothing that was asked")
        except ProtocolError as error:
            self._taker.on_fault(None, error)
            return ()
        asked = self.inflight[sequence]
        arrival = self._arrival = _Arrival(sequence, header, asked)
        try:
            arrival.reply = decoded_reply(self._replies.open(header, sequence))
            if isinstance(arrival.reply, Found) and not isinstance(asked, DescribeJob):
                arrival.places = [place for _, part in asked for place in part.destinations]
            num_bytes = sum(map(len, arrival.places))
            if num_bytes != payload_bytes:
                raise ProtocolError(f"expected {num_bytes} bytes of payload, got {payload_bytes}")
        except ProtocolError as error:
            arrival.error = error
        if arrival.error is None and not (self._replies.is_encrypted and arrival.places):
            return arrival.places
        arrival.buffer = self._pool.take(payload_bytes).data
        return [arrival.buffer]

    def on_message(self) -> None:
        """All of a reply has arrived; only if all of it is verified it counts."""
        arrival, self._arrival = self._arrival, None
        assert arrival is not None
        del self.inflight[arrival.sequence]
        self._inflight_bytes -= _num_bytes(arrival.asked)
        begun_s = time.perf_counter()
        try:
            if arrival.error is not None:
                raise arrival.error
            where = arrival.header, arrival.sequence
            if arrival.buffer is not None:
                self._replies.decrypt_payload(*where, arrival.buffer, arrival.places)
            elif arrival.places:
                self._replies.check_payload(*where, arrival.places)
            if not isinstance(arrival.asked, DescribeJob):
                share_s = (time.perf_counter() - begun_s) / len(arrival.asked)
                for job, _ in arrival.asked:
                    job.copying_s += share_s
            assert arrival.reply is not None
            self._taker.on_reply(arrival.asked, arrival.reply)
        except ProtocolError as error:
            self._taker.on_fault(arrival.asked, error)

    def on_lost(self, reason: Exception) -> None:
        """Nothing more comes over this connection."""
        self._taker.on_lost(str(reason) or repr(reason))


def _num_bytes(asked: Asked | DescribeJob) -> int:
    return 0 if isinstance(asked, DescribeJob) else sum(part.num_bytes for _, part in asked)
