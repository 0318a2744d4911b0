"""The serving side of the data plane: chunks of sealed shards, to members of the run only.

consumes     requests on the bulk socket; each is answered at once, from memory
waits for    room in a puller's queue, at most `reply_timeout_s`; then its session ends
unblocked by the puller, which reads, or whose connection ends

Whoever has no session gets nothing, not even an error: such frames are counted and dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import zmq

from areal_sc.errors import PeerLost, ProtocolError, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.reader import ShardReader, ShardSource
from areal_sc.transport.bulk.wire import (
    MAX_REQUEST_BYTES,
    Sealer,
    SessionGrant,
    parse_head,
)
from areal_sc.transport.endpoint import Context, configure_socket
from areal_sc.transport.interface import LOOPBACK, Interface
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.transport import Handler
from areal_sc.transport.socket import AsyncSocket, Buffer, Frame
from areal_sc.transport.zap import ZapGuard

logger = logging.getLogger(__name__)

OPEN_SESSION: Final = "bulk.open"
IDLE_BUFFER_BYTES: Final = 64 << 20
"""Memory kept for payload that is not sent from where it lies: joined or encrypted."""

LAST_REPLIES_LINGER_S: Final = 1.0
MAX_WAITING_REPLIES: Final = 64
"""Replies that wait for room in one puller's queue; its credits allow fewer."""


@dataclass(eq=False, slots=True)
class _Session:
    """One puller's.

    Attributes:
        password: admits one connection; None once it has.
        last_sequence: number of the newest request; older ones are replays.
        connection: routing id that the session is bound to by its first request.
    """

    puller: str
    password: bytes | None
    requests: Sealer
    replies: Sealer
    last_sequence: int = 0
    connection: bytes | None = None
    num_waiting: int = 0


class BulkServer:
    """Serves the shards of one store.

    Args:
        source: the store.
        interface: where the socket listens.
        is_encrypted: payload is encrypted, not only authenticated.
        frame_bytes: of payload under one tag; the puller checks it while it is in the cache.
        max_sessions: pullers at one time; the one that was idle longest is forgotten.
        reply_timeout_s: how long a reply waits for a puller that does not read.

    Attributes:
        num_reads: requests answered.
        num_dropped_sessions: pullers that were given up because they did not read.
        sent_bytes: of all reply frames.
    """

    def __init__(
        self,
        source: ShardSource,
        *,
        interface: Interface = LOOPBACK,
        is_encrypted: bool = False,
        frame_bytes: int = 1 << 20,
        max_sessions: int = 16_384,
        reply_timeout_s: float = 30.0,
    ) -> None:
        self._refused = Refusals(logger, "bulk_refused", source.node_id)
        self.num_reads = 0
        self.num_dropped_sessions = 0
        self.sent_bytes = 0
        self._source = source
        self._interface = interface
        self._is_encrypted = is_encrypted
        self._max_sessions = max_sessions
        self._reply_timeout_s = reply_timeout_s
        self._pool = BufferPool(IDLE_BUFFER_BYTES)
        self._reader = ShardReader(source, self._pool, frame_bytes)
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()
        self._sending: set[asyncio.Task[None]] = set()
        self._address = ""
        self._context: Context | None = None
        self._guard: ZapGuard | None = None
        self._socket: AsyncSocket | None = None

    @property
    def num_refused(self) -> int:
        """Frames dropped because no member of the run sent them so."""
        return self._refused.num

    async def start(self) -> str:
        """Starts to serve on the running event loop; returns the address of the bulk socket.

        Raises: TransportError: the interface cannot be bound.
        """
        assert self._socket is None, "started twice"
        self._context = zmq.Context()
        raw = self._context.socket(zmq.ROUTER)
        configure_socket(raw, MAX_REQUEST_BYTES)
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        raw.plain_server = True
        # without it a stranger could send parts of a message without end, which ZMQ would keep
        self._guard = ZapGuard(self._context, raw, self._admit_connection, self._refused)
        # A stopped puller is given up by ZMQ's pings while nothing is on the way to it, and by the
        # kernel while something is: then no ping is sent. Either way its queue is dropped.
        timeout_ms = round(self._reply_timeout_s * 1000)
        raw.setsockopt(zmq.HEARTBEAT_IVL, max(timeout_ms // 3, 1))
        raw.setsockopt(zmq.HEARTBEAT_TIMEOUT, timeout_ms)
        raw.setsockopt(zmq.TCP_MAXRT, timeout_ms)
        raw.setsockopt(zmq.SNDHWM, MAX_WAITING_REPLIES)
        try:
            raw.bind(f"{self._interface.bind}:0")
        except zmq.ZMQError as error:
            self._guard.close()
            raw.close()
            self._context.term()
            raise TransportError(
                f"{self._source.node_id} cannot listen on {self._interface.bind}: {error}"
            ) from error
        self._address = self._interface.reachable(raw.getsockopt_string(zmq.LAST_ENDPOINT))
        self._socket = AsyncSocket(raw, self._on_message, max_parts=2)
        return self._address

    def handlers(self) -> dict[str, Handler]:
        """The RPC method by which members of the run get a session."""

        def open_session(args: dict[str, Any]) -> list[Any]:
            return self.open_session(str(args.get("puller"))).to_wire()

        return {OPEN_SESSION: open_session}

    def open_session(self, puller: str) -> SessionGrant:
        """A new session, for whoever the control socket has let in."""
        grant = SessionGrant.create(self._address, self._is_encrypted)
        self._sessions[grant.session_id] = _Session(
            puller,
            grant.password,
            Sealer(grant.session_id, grant.request_key, grant.is_encrypted),
            Sealer(grant.session_id, grant.reply_key, grant.is_encrypted, self._pool),
        )
        while len(self._sessions) > self._max_sessions:
            self._sessions.popitem(last=False)
        return grant

    async def close(self) -> None:
        """Stops serving; replies already queued are still sent, for a bounded time."""
        if self._socket is None or self._context is None or self._guard is None:
            return
        self._guard.close()
        for task in self._sending:
            task.cancel()
        try:
            await asyncio.gather(*self._sending, return_exceptions=True)
        finally:
            self._socket.close(LAST_REPLIES_LINGER_S)
        await asyncio.to_thread(self._context.term)

    def _admit_connection(self, mechanism: bytes, credentials: list[bytes]) -> str | None:
        """Whether a connection shows the ticket of a session that has none yet."""
        match credentials:
            case [session_id, password] if mechanism == b"PLAIN":
                session = self._sessions.get(_from_hex(session_id))
                if session is None or session.password is None:
                    return "shows no ticket of a session, or one that was used"
                if not hmac.compare_digest(session.password, _from_hex(password)):
                    return f"shows a wrong ticket of the session of {session.puller}"
                session.password = None
                return None
        return "shows no ticket"

    def _on_message(self, frames: list[Frame]) -> None:
        connection = bytes(frames[0])
        try:
            session_id, session, sequence, body = self._admit(connection, frames[1:])
        except ProtocolError as error:
            self._refused.add(error)
            return
        self._sessions.move_to_end(session_id)
        self.num_reads += 1
        reply, payload = self._reader.answer(body)
        sent, tags = session.replies.seal_payload(sequence, payload)
        header = session.replies.seal_header(sequence, [*reply, tags])
        self._send(session_id, session, [connection, header, *sent])

    def _admit(
        self, connection: bytes, frames: Sequence[Frame]
    ) -> tuple[bytes, _Session, int, Any]:
        """The request's session, number and body, if a member of the run sent it just now."""
        if len(frames) != 1:
            raise ProtocolError(f"a request has one frame, not {len(frames)}")
        session_id, sequence = parse_head(frames[0], MAX_REQUEST_BYTES)
        session = self._sessions.get(session_id)
        if session is None:
            raise ProtocolError("no such session")
        if session.connection not in (None, connection):
            raise ProtocolError(f"the session of {session.puller} belongs to another connection")
        if sequence <= session.last_sequence:
            raise ProtocolError(f"request {sequence} of {session.puller} is a replay")
        body = session.requests.open_header(frames[0], sequence)
        session.connection, session.last_sequence = connection, sequence
        return session_id, session, sequence, body

    def _send(self, session_id: bytes, session: _Session, frames: Sequence[Buffer]) -> None:
        assert self._socket is not None
        try:
            if session.num_waiting == 0 and self._socket.send_nowait(frames):
                self.sent_bytes += sum(map(len, frames[1:]))
                return
        except PeerLost as error:
            self._drop(session_id, session, error)
            return
        if session.num_waiting >= MAX_WAITING_REPLIES:
            self._drop(session_id, session, ProtocolError("it asks for more than it reads"))
            return
        session.num_waiting += 1
        task = asyncio.create_task(self._send_when_possible(session_id, session, frames))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send_when_possible(
        self, session_id: bytes, session: _Session, frames: Sequence[Buffer]
    ) -> None:
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await self._socket.send_multipart(frames)
            self.sent_bytes += sum(map(len, frames[1:]))
        except (PeerLost, TimeoutError) as error:
            self._drop(session_id, session, error)
        finally:
            session.num_waiting -= 1

    def _drop(self, session_id: bytes, session: _Session, error: Exception) -> None:
        if self._sessions.pop(session_id, None) is not None:
            self.num_dropped_sessions += 1
            logger.warning(
                "puller_dropped node=%s puller=%s error=%r",
                *(self._source.node_id, session.puller, error),
            )


def _from_hex(text: bytes) -> bytes:
    """The bytes that a text stands for; b"" when it is none of ours."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
