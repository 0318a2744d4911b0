"""The serving side of the data plane: bytes of sealed shards, to members of the run only.

consumes     connections that show a session, and their requests, each answered from memory
waits for    callers to show it, at most `HANDSHAKE_TIMEOUT_MS`; pullers that neither ask nor read,
             at most `reply_timeout_s`: a queue of replies must not wait for them
unblocked by the pullers, or the end of their connections

Whoever has no session gets nothing, not even an error, and `MAX_HELLO_BYTES` are all that is kept
of it: such callers are counted and put out. A puller that was put out, or was idle, opens another
session when it needs one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Final

from areal_sc.errors import ProtocolError, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import OPEN_SESSION, SessionGrant
from areal_sc.transport.bulk.reader import ShardReader, ShardSource
from areal_sc.transport.bulk.stream import MessageStream, configure, framed
from areal_sc.transport.bulk.wire import (
    MAX_HELLO_BYTES,
    MAX_REQUEST_BYTES,
    Failure,
    Hello,
    Reply,
    Sealer,
    decoded_request,
    parse_head,
)
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.sockets.interface import LOOPBACK, Interface
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import HANDSHAKE_TIMEOUT_MS, Buffer

logger = logging.getLogger(__name__)

IDLE_BUFFER_BYTES: Final = 64 << 20
"""Memory kept for payload that is not sent from where it lies: joined or encrypted."""

MAX_WAITING_REPLIES: Final = 64
"""Of one puller; its credits allow fewer."""

MAX_CALLERS: Final = 512
"""That have not shown their session yet; beyond, the one that has waited longest is put out."""

CHECKS_PER_TIMEOUT: Final = 4
"""A puller that has stopped is dropped within 5/4 of its time."""

_ACCEPT_RETRY_S: Final = 0.2
"""After the system had no file descriptor or memory left for another connection."""


class _Puller:
    """One connection; a `MessageSink`.

    Attributes:
        name: of the other side, for messages.
        session_id: that it has shown; b"": none yet.
    """

    def __init__(self, server: BulkServer, connection: socket.socket, host: str) -> None:
        self.name = host
        self.session_id = b""
        self.stream = MessageStream(connection, self, max_header_bytes=MAX_HELLO_BYTES)
        self._server = server
        self._request = memoryview(b"")
        self._requests: Sealer | None = None
        self._replies: Sealer | None = None
        self._last_sequence = 0  # of the newest request; older ones are replays
        self._seen_bytes = 0
        self._num_idle_checks = 0

    def check_life(self) -> int:
        """How many checks in a row, this one included, have found that nothing moves."""
        is_idle = self.stream.moved_bytes == self._seen_bytes
        self._num_idle_checks = self._num_idle_checks + 1 if is_idle else 0
        self._seen_bytes = self.stream.moved_bytes
        return self._num_idle_checks

    def on_header(self, header: memoryview, payload_bytes: int) -> Sequence[memoryview]:
        """Requests are headers alone."""
        if payload_bytes:
            raise ProtocolError(f"{self.name} sends a request with a payload")
        self._request = header
        return ()

    def on_message(self) -> None:
        """Answers a request.

        One that does not verify was altered or forged. The puller may wait for an answer that it
        would never get, so the connection ends, and the puller knows.
        """
        try:
            self._answer()
        except ProtocolError as error:
            self._server.drop(self, str(error), is_refused=True)

    def on_lost(self, reason: Exception) -> None:
        """The puller has left, or does not speak the protocol."""
        is_refused = isinstance(reason, ProtocolError) or not self.session_id
        self._server.drop(self, str(reason), is_refused=is_refused)

    def _answer(self) -> None:
        session_id, sequence = parse_head(self._request, MAX_REQUEST_BYTES)
        if not self.session_id:
            self._show(session_id, sequence)
            return
        assert self._requests is not None
        if session_id != self.session_id:
            raise ProtocolError(f"{self.name} names a session that is not its own")
        if sequence <= self._last_sequence:
            raise ProtocolError(f"request {sequence} of {self.name} is a replay")
        packed = self._requests.open(self._request, sequence)
        self._last_sequence = sequence
        if self.stream.num_waiting == MAX_WAITING_REPLIES:
            raise ProtocolError(f"{self.name} asks for more than it reads")
        reply, payload = self._server.answer(packed)
        self.stream.send(partial(self._sealed, sequence, reply, payload))

    def _show(self, session_id: bytes, sequence: int) -> None:
        """The first request is only taken if its tag is right."""
        name, grant = self._server.granted(session_id)
        requests = Sealer(session_id, grant.request_key, grant.is_encrypted)
        if not isinstance(decoded_request(requests.open(self._request, sequence)), Hello):
            raise ProtocolError("the caller does not show its session")
        pool = self._server.pool
        self.name, self.session_id, self._last_sequence = name, session_id, sequence
        self._requests = requests
        self._replies = Sealer(session_id, grant.reply_key, grant.is_encrypted, pool)
        self.stream.max_header_bytes = MAX_REQUEST_BYTES
        self._server.admit(self)

    def _sealed(self, sequence: int, reply: Reply, payload: Sequence[memoryview]) -> list[Buffer]:
        assert self._replies is not None
        header, sent = self._replies.seal(sequence, reply, payload)
        self._server.sent_bytes += len(header) + sum(map(len, sent))
        return framed(header, sent)


class BulkServer:
    """Serves the shards of one store.

    Args:
        source: the store.
        interface: where the socket listens.
        is_encrypted: payload is encrypted, not only authenticated.
        max_sessions: pullers at one time, and sessions not shown yet; the oldest is forgotten.
        reply_timeout_s: how long a puller may neither ask nor read.

    Attributes:
        num_reads: requests answered.
        num_dropped: pullers that were put out.
        sent_bytes: of all reply frames.
        pool: memory of payload that is not sent from where it lies.
    """

    def __init__(
        self,
        source: ShardSource,
        *,
        interface: Interface = LOOPBACK,
        is_encrypted: bool = False,
        max_sessions: int = 16_384,
        reply_timeout_s: float = 30.0,
    ) -> None:
        self.num_reads = 0
        self.num_dropped = 0
        self.sent_bytes = 0
        self.pool = BufferPool(IDLE_BUFFER_BYTES)
        self._refused = Refusals(logger, "bulk_refused", source.node_id)
        self._node_id = source.node_id
        self._interface = interface
        self._is_encrypted = is_encrypted
        self._max_sessions = max_sessions
        self._reply_timeout_s = reply_timeout_s
        self._reader = ShardReader(source)
        self._grants: OrderedDict[bytes, tuple[str, SessionGrant]] = OrderedDict()
        # both in the order of their coming
        self._callers: dict[_Puller, asyncio.TimerHandle] = {}
        self._pullers: dict[_Puller, None] = {}
        self._address = ""
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_refused(self) -> int:
        """Callers and requests dropped because they are no member's."""
        return self._refused.num

    async def start(self) -> str:
        """Starts to serve on the running event loop; returns the address of the bulk socket.

        Raises: TransportError: the interface cannot be bound.
        """
        assert self._listener is None, "started twice"
        try:
            host = self._interface.listening_host()
            self._listener = socket.create_server((host, 0), backlog=MAX_CALLERS)
        except OSError as error:
            raise TransportError(
                f"{self._node_id} cannot listen on {self._interface.bind}: {error}"
            ) from error
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self._address = self._interface.reachable(f"tcp://{host}:{port}")
        self._tasks = [
            asyncio.create_task(self._accept(self._listener), name=f"callers of {self._node_id}"),
            asyncio.create_task(self._watch(), name=f"pullers of {self._node_id}"),
        ]
        return self._address

    def methods(self) -> list[Served]:
        """The RPC method by which members of the run get a session."""
        return [OPEN_SESSION.served_by(self.open_session)]

    def open_session(self, puller: str) -> SessionGrant:
        """A new session, for whoever the control socket has let in."""
        grant = SessionGrant.create(self._address, self._is_encrypted)
        self._grants[grant.session_id] = puller, grant
        if len(self._grants) > self._max_sessions:
            self._grants.popitem(last=False)
        return grant

    def granted(self, session_id: bytes) -> tuple[str, SessionGrant]:
        """Puller and keys of a session that has no connection yet.

        Raises: ProtocolError: there is none.
        """
        found = self._grants.get(session_id)
        if found is None:
            raise ProtocolError("the caller shows no session, or one that has a connection")
        return found

    def admit(self, puller: _Puller) -> None:
        """It has shown a session, which no other connection can show any more."""
        del self._grants[puller.session_id]
        self._callers.pop(puller).cancel()
        self._pullers[puller] = None
        if len(self._pullers) > self._max_sessions:
            self.drop(next(iter(self._pullers)), "too many pullers")

    def answer(self, packed: Buffer) -> tuple[Reply, Sequence[memoryview]]:
        """Reply and payload to what a member of the run has asked, whatever that is."""
        self.num_reads += 1
        try:
            request = decoded_request(packed)
            if isinstance(request, Hello):
                raise ProtocolError("the session was shown before")
        except ProtocolError as error:
            return Failure.of(error), ()
        return self._reader.answer(request)

    def drop(self, puller: _Puller, reason: str, *, is_refused: bool = False) -> None:
        """Ends the connection, if it has not ended by itself."""
        puller.stream.close()
        if is_refused:
            self._refused.add(f"{puller.name}: {reason}")
        if puller in self._callers:
            self._callers.pop(puller).cancel()
        elif puller in self._pullers:
            del self._pullers[puller]
            self.num_dropped += 1
            logger.debug("puller_dropped puller=%s reason=%s", puller.name, reason)

    async def close(self) -> None:
        """Stops serving; pulls that wait for an answer fail."""
        for task in self._tasks:
            task.cancel()
        ends = await asyncio.gather(*self._tasks, return_exceptions=True)
        for puller in [*self._callers, *self._pullers]:
            self.drop(puller, "this side closed")
        if self._listener is not None:
            self._listener.close()
        for end in ends:
            if isinstance(end, Exception):
                raise end

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, (host, *_) = await loop.sock_accept(listener)
                configure(connection)
            except ConnectionError:  # the caller has left already
                continue
            except OSError as error:
                self._refused.add(f"a connection could not be taken: {error}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._callers) == MAX_CALLERS:
                self.drop(next(iter(self._callers)), "it made room for others", is_refused=True)
            caller = _Puller(self, connection, host)
            late = partial(self.drop, caller, "it showed no session in time", is_refused=True)
            self._callers[caller] = loop.call_later(HANDSHAKE_TIMEOUT_MS / 1000, late)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._reply_timeout_s / CHECKS_PER_TIMEOUT)
            self._check_lives()

    def _check_lives(self) -> None:
        for puller in list(self._pullers):
            if puller.check_life() > CHECKS_PER_TIMEOUT:
                self.drop(puller, f"nothing moves for {self._reply_timeout_s:g} s")
