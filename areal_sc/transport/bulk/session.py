"""One puller's session with an owner, as the owner sees it.

consumes     requests, each answered at once, from memory
waits for    room in the connection: payload is sealed only when it can be sent
unblocked by the puller, which reads; one that does not is dropped by the server
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any, Final

from areal_sc.errors import ProtocolError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.frame_stream import FrameStream, Outgoing
from areal_sc.transport.bulk.grant import SessionGrant
from areal_sc.transport.bulk.reader import Parts
from areal_sc.transport.bulk.turns import Turns
from areal_sc.transport.bulk.wire import MAX_REQUEST_BYTES, Sealer, parse_head
from areal_sc.transport.refusals import Refusals

MAX_WAITING_REPLIES: Final = 64
"""Of one puller; its credits allow fewer."""

Answer = Callable[[Any], tuple[list[Any], list[Parts]]]


class PullerSession:
    """A `FrameSink`, once `begin` has given it a connection.

    Args:
        puller: name of the other side, for messages.
        grant: what the puller was given.
        answer: to a request's body: the reply's, and the payload of its frames.
        pool: gives memory for payload that is not sent from where it lies.
        refused: counts frames that no member of the run sent so.
        on_ended: called when the puller has left, or has to.

    Attributes:
        num_reads: requests answered.
        sent_bytes: of all reply frames.
    """

    def __init__(
        self,
        puller: str,
        grant: SessionGrant,
        answer: Answer,
        *,
        pool: BufferPool,
        refused: Refusals,
        on_ended: Callable[[PullerSession, str], None],
    ) -> None:
        self.puller = puller
        self.num_reads = 0
        self.sent_bytes = 0
        self._id = grant.session_id
        self._requests = Sealer(grant.session_id, grant.request_key, grant.is_encrypted)
        self._replies = Sealer(grant.session_id, grant.reply_key, grant.is_encrypted, pool)
        self._answer = answer
        self._refused = refused
        self._on_ended = on_ended
        self._last_sequence = 0  # of the newest request; older ones are replays
        self._request = memoryview(b"")
        self._stream: FrameStream | None = None
        self._seen_bytes = 0
        self._num_silent_checks = 0

    def begin(self, connection: socket.socket, turns: Turns) -> None:
        """Serves the puller, which has shown its ticket on this connection."""
        self._stream = FrameStream(connection, self, turns)

    def close(self) -> None:
        """Ends the connection; what was not sent yet is dropped."""
        if self._stream is not None:
            self._stream.close()

    def check_life(self) -> int:
        """How many checks in a row, this one included, have found that nothing moves.

        An idle puller's answers to pings count; so does taking some of a long reply.
        """
        assert self._stream is not None
        has_moved = self._stream.moved_bytes != self._seen_bytes
        self._num_silent_checks = 0 if has_moved else self._num_silent_checks + 1
        self._seen_bytes = self._stream.moved_bytes
        self._stream.ping()
        return self._num_silent_checks

    def places(self, num_bytes: int) -> list[memoryview]:
        """Memory for a request; raises as `FrameSink.places`."""
        if num_bytes > MAX_REQUEST_BYTES:
            raise self._refusal(f"{self.puller} sends a request of {num_bytes} bytes")
        self._request = memoryview(bytearray(num_bytes))
        return [self._request] if num_bytes else []

    def on_frame(self, *, has_more: bool) -> None:
        """Answers a request; raises as `FrameSink.on_frame`.

        A request that does not verify was altered or forged. The puller may wait for an answer that
        it would never get, so the connection ends, and the puller knows.
        """
        if has_more:
            raise self._refusal(f"a request of {self.puller} has more than one frame")
        try:
            sequence, body = self._opened(self._request)
        except ProtocolError as error:
            raise self._refusal(str(error)) from None
        assert self._stream is not None
        if self._stream.num_waiting == MAX_WAITING_REPLIES:
            raise self._refusal(f"{self.puller} asks for more than it reads")
        self.num_reads += 1
        reply, frames = self._answer(body)
        self._stream.send(self._sealed(sequence, reply, frames))

    def on_lost(self, reason: str) -> None:
        """The puller has left."""
        self._on_ended(self, reason)

    def _refusal(self, reason: str) -> ProtocolError:
        """What ends the connection."""
        self._refused.add(reason)
        return ProtocolError(reason)

    def _opened(self, request: memoryview) -> tuple[int, Any]:
        """Number and body of the request, if the puller sent it just now."""
        session_id, sequence = parse_head(request, MAX_REQUEST_BYTES)
        if session_id != self._id:
            raise ProtocolError(f"{self.puller} names a session that is not its own")
        if sequence <= self._last_sequence:
            raise ProtocolError(f"request {sequence} of {self.puller} is a replay")
        body = self._requests.open_header(request, sequence)
        self._last_sequence = sequence
        return sequence, body

    def _sealed(self, sequence: int, reply: list[Any], frames: list[Parts]) -> Iterator[Outgoing]:
        header = self._replies.seal_header(sequence, reply)
        self.sent_bytes += len(header)
        yield [header], bool(frames)
        for number, payload in enumerate(frames, 1):
            parts = self._replies.seal_frame(sequence, number, payload)
            self.sent_bytes += sum(map(len, parts))
            yield parts, number < len(frames)
