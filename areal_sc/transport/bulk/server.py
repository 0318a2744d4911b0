"""The serving side of the data plane: bytes of sealed shards, to members of the run only.

consumes     connections that show a session, and their requests, each answered from memory
waits for    callers to show it, at most `HANDSHAKE_TIMEOUT_MS`; pullers that neither ask nor read,
             at most `reply_timeout_s`: a queue of replies must not wait for them
unblocked by the pullers, or the end of their connections

Whoever has no session gets nothing, not even an error, and `HELLO_BYTES` are all that is kept of
it: such callers are counted and put out. A puller that was put out, or was idle, opens another
session when it needs one.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import OrderedDict
from collections.abc import Container, Sequence
from functools import partial
from typing import Final

import msgspec

from areal_sc.errors import MetadataError, ProtocolError, ShardGone, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.messages import (
    FAILURE,
    HELLO,
    HELLO_BYTES,
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    MAX_REQUEST_ROWS,
    PREFIX,
    READ,
    REQUESTS,
    ROWS,
    MessageCipher,
    PullFailure,
    decoded,
)
from areal_sc.transport.bulk.plan import find_bytes, window
from areal_sc.transport.bulk.session import (
    DESCRIBE,
    OPEN_SESSION,
    FieldDescription,
    SessionGrant,
)
from areal_sc.transport.bulk.stream import MessageStream, configure
from areal_sc.transport.rpc.method import Served
from areal_sc.transport.shards.store import TensorStore
from areal_sc.transport.sockets.interface import LOOPBACK, Interface, family_of
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import HANDSHAKE_TIMEOUT_MS, Buffer

logger = logging.getLogger(__name__)

IDLE_BUFFER_BYTES: Final = 64 << 20
"""Memory kept for encrypted replies."""

MAX_SESSIONS: Final = 16_384
"""Pullers at one time, and sessions not shown yet; beyond, the oldest is forgotten."""

MAX_WAITING_REPLIES: Final = 64
"""Most replies that may wait for one puller; its credits allow fewer."""

MAX_CALLERS: Final = 512
"""Most callers yet to show their session; beyond, the one that has waited longest is put out."""

CHECKS_PER_TIMEOUT: Final = 4
"""A puller that has stopped is dropped within 5/4 of its time."""

_ACCEPT_RETRY_S: Final = 0.2
"""After the system had no file descriptor or memory left for another connection."""


class _PullingPeer:
    """One connection; a `MessageSink`.

    Attributes:
        name: of the other side, for messages.
        key: public key of whom the session was opened for.
        is_admitted: it has shown a session.
    """

    def __init__(self, server: BulkServer, connection: socket.socket, host: str) -> None:
        self.name = host
        self.key = ""
        self.is_admitted = False
        self.stream = MessageStream(connection, self)
        self._server = server
        self._content = memoryview(b"")
        self._requests: MessageCipher  # this and `_replies`: since it is admitted
        self._replies: MessageCipher

    def on_head(self, kind: int, num_bytes: int) -> Sequence[memoryview]:
        """Raises: ProtocolError: no correct puller sends such a message."""
        expected = (READ, MAX_REQUEST_BYTES) if self.is_admitted else (HELLO, HELLO_BYTES)
        if kind != expected[0] or not 0 < num_bytes <= expected[1]:
            raise ProtocolError(f"{self.name} sends a message of kind {kind}, {num_bytes} bytes")
        self._content = memoryview(bytearray(num_bytes))
        return [self._content]

    def on_message(self, kind: int, tag: bytes) -> None:
        """Answers a request.

        One that does not verify was altered or forged. The puller may wait for an answer that it
        would never get, so the connection ends, and the puller knows.
        """
        if not self.is_admitted:
            self._show(tag)
            return
        self._requests.open(kind, tag, [self._content])
        if self.stream.num_waiting == MAX_WAITING_REPLIES:
            raise ProtocolError(f"{self.name} asks for more than it reads")
        self.stream.send(partial(self._reply, self._content))

    def on_lost(self, reason: Exception) -> None:
        """The puller has left, or does not speak the protocol."""
        is_refused = isinstance(reason, ProtocolError) or not self.is_admitted
        self._server.drop(self, str(reason), is_refused=is_refused)

    def _show(self, tag: bytes) -> None:
        """The session is taken only if the tag is right: nobody can use up another one's."""
        prefix, session_id = (
            bytes(self._content[: len(PREFIX)]),
            bytes(self._content[len(PREFIX) :]),
        )
        if prefix != PREFIX:
            raise ProtocolError(f"expected protocol {PREFIX!r}, got {prefix!r}")
        self.name, self.key, grant = self._server.granted(session_id)
        self._requests = MessageCipher(grant.request_key, grant.is_encrypted)
        self._replies = MessageCipher(grant.reply_key, grant.is_encrypted, self._server.pool)
        self._requests.open(HELLO, tag, [self._content])
        self._server.admit(self, session_id)
        self.is_admitted = True

    def _reply(self, content: Buffer) -> list[Buffer]:
        message = self._replies.seal(*self._server.answer(content))
        self._server.sent_bytes += sum(map(len, message))
        return message


class BulkServer:
    """Serves the shards of one store.

    Args:
        interface: where the socket listens.
        is_encrypted: payload is encrypted, not only authenticated.
        reply_timeout_s: how long a puller may neither ask nor read.

    Attributes:
        num_reads: requests answered.
        num_dropped: pullers that were put out.
        refused: callers and requests dropped because they are no member's.
        sent_bytes: of all replies.
        pool: memory of encrypted replies.
    """

    def __init__(
        self,
        store: TensorStore,
        *,
        interface: Interface = LOOPBACK,
        is_encrypted: bool = False,
        reply_timeout_s: float = 30.0,
    ) -> None:
        self.num_reads = 0
        self.num_dropped = 0
        self.sent_bytes = 0
        self.pool = BufferPool(IDLE_BUFFER_BYTES)
        self.refused = Refusals(logger, "bulk_refused", store.node_id)
        self._store = store
        self._interface = interface
        self._is_encrypted = is_encrypted
        self._reply_timeout_s = reply_timeout_s
        self._grants: OrderedDict[bytes, tuple[str, str, SessionGrant]] = OrderedDict()
        # both in the order of their coming
        self._callers: dict[_PullingPeer, asyncio.TimerHandle] = {}
        self._pullers: dict[_PullingPeer, None] = {}
        self._address = ""
        self._listener: socket.socket | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Starts to serve on the running event loop; returns the address of the bulk socket.

        Raises: TransportError: the interface cannot be bound.
        """
        assert self._listener is None, "started twice"
        node_id, host = self._store.node_id, self._interface.host
        try:
            self._listener = socket.create_server(
                (host, 0), family=family_of(host), backlog=MAX_CALLERS
            )
        except OSError as error:
            raise TransportError(f"{node_id} cannot listen on {host}: {error}") from error
        self._listener.setblocking(False)
        port = self._listener.getsockname()[1]
        self._address = self._interface.reachable(f":{port}")
        self._tasks = [
            asyncio.create_task(self._accept(self._listener), name=f"callers of {node_id}"),
            asyncio.create_task(self._watch(), name=f"pullers of {node_id}"),
        ]
        return self._address

    def methods(self) -> list[Served]:
        """The RPC methods by which members of the run get a session, and what they may ask."""
        return [OPEN_SESSION.served_to(self.open_session), DESCRIBE.served_by(self.describe)]

    def open_session(self, puller: str, key: str = "") -> SessionGrant:
        """A new session, for whoever the control socket has let in, with that public key."""
        grant = SessionGrant.create(self._address, self._is_encrypted)
        self._grants[grant.session_id] = puller, key, grant
        if len(self._grants) > MAX_SESSIONS:
            self._grants.popitem(last=False)
        return grant

    def describe(self, shard_id: str) -> list[FieldDescription]:
        """The fields of a shard. Raises: ShardGone, MetadataError: there is no such shard."""
        fields = self._store.describe(shard_id).items()
        return [FieldDescription(name, field.dtype, field.row_lengths) for name, field in fields]

    def end_sessions(self, known: Container[str]) -> None:
        """Ends those of callers whose public keys are not known any more."""
        for session_id, (_, key, _) in list(self._grants.items()):
            if key not in known:
                del self._grants[session_id]
        for puller in list(self._pullers):
            if puller.key not in known:
                self.drop(puller, "it has been started again")

    def granted(self, session_id: bytes) -> tuple[str, str, SessionGrant]:
        """Puller, its public key, and keys of a session that has no connection yet.

        Raises: ProtocolError: there is none.
        """
        found = self._grants.get(session_id)
        if found is None:
            raise ProtocolError("the caller shows no session, or one that has a connection")
        return found

    def admit(self, puller: _PullingPeer, session_id: bytes) -> None:
        """It has shown a session, which no other connection can show any more."""
        del self._grants[session_id]
        self._callers.pop(puller).cancel()
        self._pullers[puller] = None
        if len(self._pullers) > MAX_SESSIONS:
            self.drop(next(iter(self._pullers)), "too many pullers")

    def answer(self, content: Buffer) -> tuple[int, Sequence[Buffer]]:
        """(kind, content) of the reply to what a member of the run has asked, whatever that is."""
        self.num_reads += 1
        parts: list[memoryview] = []
        number, room, num_rows = 0, MAX_REPLY_BYTES, MAX_REQUEST_ROWS
        try:
            for wanted in decoded(REQUESTS, content):
                room -= wanted.num_bytes
                num_rows -= wanted.num_rows
                if room < 0 or num_rows < 0:
                    raise ProtocolError(
                        f"a reply has at most {MAX_REPLY_BYTES} bytes of {MAX_REQUEST_ROWS} rows"
                    )
                held = self._store.describe(wanted.shard_id)
                found = find_bytes(held, wanted, self._store.node_id)
                flat = [part for of_field in found for part in of_field]
                parts += window(flat, wanted.skip, wanted.num_bytes)
                number += 1
        except (ShardGone, MetadataError, ProtocolError) as error:
            return FAILURE, [msgspec.msgpack.encode(PullFailure.of(error, number))]
        return ROWS, parts

    def drop(self, puller: _PullingPeer, reason: str, *, is_refused: bool = False) -> None:
        """Ends the connection, if it has not ended by itself."""
        puller.stream.close()
        if is_refused:
            self.refused.add(f"{puller.name}: {reason}")
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
                self.refused.add(f"a connection could not be taken: {error}")
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            if len(self._callers) == MAX_CALLERS:
                self.drop(next(iter(self._callers)), "it made room for others", is_refused=True)
            caller = _PullingPeer(self, connection, host)
            late = partial(self.drop, caller, "it showed no session in time", is_refused=True)
            self._callers[caller] = loop.call_later(HANDSHAKE_TIMEOUT_MS / 1000, late)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(self._reply_timeout_s / CHECKS_PER_TIMEOUT)
            self._check_lives()

    def _check_lives(self) -> None:
        for puller in list(self._pullers):
            if puller.stream.count_idle_looks() > CHECKS_PER_TIMEOUT:
                self.drop(puller, f"nothing moves for {self._reply_timeout_s:g} s")
