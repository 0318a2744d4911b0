"""The serving side of the data plane: chunks of sealed shards, to members of the run only.

consumes     connections that show the ticket of a session, and their requests
waits for    pullers to read, at most `reply_timeout_s` without any progress
unblocked by the pullers, or the end of their connections

Whoever has no session gets nothing, not even an error: such callers and frames are counted and
dropped.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
from collections import OrderedDict
from typing import Final

from areal_sc.errors import ProtocolError, TransportError
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import OPEN_SESSION, SessionGrant
from areal_sc.transport.bulk.handshake import receive_ticket, welcome
from areal_sc.transport.bulk.listener import Listener
from areal_sc.transport.bulk.reader import ShardReader, ShardSource
from areal_sc.transport.bulk.session import PullerSession
from areal_sc.transport.bulk.turns import Turns
from areal_sc.transport.interface import LOOPBACK, Interface
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.method import Served

logger = logging.getLogger(__name__)

IDLE_BUFFER_BYTES: Final = 64 << 20
"""Memory kept for payload that is not sent from where it lies: joined or encrypted."""

CHECKS_PER_TIMEOUT: Final = 4
"""Of a puller's life: one that has stopped is dropped within 5/4 of its time."""


class BulkServer:
    """Serves the shards of one store.

    Args:
        source: the store.
        interface: where the socket listens.
        is_encrypted: payload is encrypted, not only authenticated.
        frame_bytes: of payload under one tag; the puller checks it while it is in the cache.
        max_sessions: pullers at one time, and tickets not shown yet; the oldest is forgotten.
        reply_timeout_s: how long a puller may neither read nor answer.
        turns: those of all bulk connections on the event loop.

    Attributes:
        num_dropped_sessions: pullers that were given up because they did not read.
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
        turns: Turns | None = None,
    ) -> None:
        self.num_dropped_sessions = 0
        self._refused = Refusals(logger, "bulk_refused", source.node_id)
        self._node_id = source.node_id
        self._interface = interface
        self._is_encrypted = is_encrypted
        self._max_sessions = max_sessions
        self._reply_timeout_s = reply_timeout_s
        self._turns = turns or Turns()
        self._pool = BufferPool(IDLE_BUFFER_BYTES)
        self._reader = ShardReader(source, frame_bytes)
        self._grants: OrderedDict[bytes, tuple[str, SessionGrant]] = OrderedDict()
        self._sessions: dict[PullerSession, None] = {}  # in the order of their beginning
        self._ended_reads = 0
        self._ended_bytes = 0
        self._address = ""
        self._listener: Listener | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def num_refused(self) -> int:
        """Callers and frames dropped because they are no member's."""
        return self._refused.num

    @property
    def num_reads(self) -> int:
        """Requests answered."""
        return self._ended_reads + sum(session.num_reads for session in self._sessions)

    @property
    def sent_bytes(self) -> int:
        """Bytes of all reply frames."""
        return self._ended_bytes + sum(session.sent_bytes for session in self._sessions)

    async def start(self) -> str:
        """Starts to serve on the running event loop; returns the address of the bulk socket.

        Raises: TransportError: the interface cannot be bound.
        """
        assert self._listener is None, "started twice"
        try:
            host = self._interface.listening_host()
            self._listener = Listener(host, self._let_in, self._refused)
        except OSError as error:
            raise TransportError(
                f"{self._node_id} cannot listen on {self._interface.bind}: {error}"
            ) from error
        self._address = self._interface.reachable(f"tcp://{host}:{self._listener.port}")
        self._watching = asyncio.create_task(self._watch(), name=f"pullers of {self._node_id}")
        return self._address

    def methods(self) -> list[Served]:
        """The RPC method by which members of the run get a session."""
        return [OPEN_SESSION.served_by(self.open_session)]

    def open_session(self, puller: str) -> SessionGrant:
        """A new session, for whoever the control socket has let in."""
        grant = SessionGrant.create(self._address, self._is_encrypted)
        self._grants[grant.session_id] = puller, grant
        while len(self._grants) > self._max_sessions:
            self._grants.popitem(last=False)
        return grant

    async def close(self) -> None:
        """Stops serving; pulls that wait for an answer fail."""
        if self._listener is None or self._watching is None:
            return
        await self._listener.close()
        self._watching.cancel()
        for session in self._sessions:
            session.close()
        ends = await asyncio.gather(self._watching, return_exceptions=True)
        if isinstance(ends[0], Exception):
            raise ends[0]

    async def _let_in(self, connection: socket.socket) -> None:
        """A puller with the ticket of a session that has no connection yet."""
        name, password = await receive_ticket(connection)
        puller, grant = self._grants.get(_from_hex(name), ("", None))
        if grant is None:
            raise ProtocolError("the caller shows no ticket of a session, or one that was used")
        if not hmac.compare_digest(grant.password, _from_hex(password)):
            raise ProtocolError(f"the caller shows a wrong ticket of the session of {puller}")
        del self._grants[grant.session_id]
        await welcome(connection)
        session = PullerSession(
            puller,
            grant,
            self._reader.answer,
            pool=self._pool,
            refused=self._refused,
            on_ended=self._forget,
        )
        session.begin(connection, self._turns)
        self._sessions[session] = None
        if len(self._sessions) > self._max_sessions:
            self._drop(next(iter(self._sessions)), "too many pullers")

    async def _watch(self) -> None:
        """Gives up pullers that have stopped: a queue of replies must not wait for them."""
        while True:
            await asyncio.sleep(self._reply_timeout_s / CHECKS_PER_TIMEOUT)
            self._check_lives()

    def _check_lives(self) -> None:
        for session in list(self._sessions):
            if session.check_life() > CHECKS_PER_TIMEOUT:
                self._drop(session, f"nothing moves for {self._reply_timeout_s:g} s")

    def _drop(self, session: PullerSession, reason: str) -> None:
        self.num_dropped_sessions += 1
        logger.warning(
            "puller_dropped node=%s puller=%s reason=%s", self._node_id, session.puller, reason
        )
        self._forget(session, reason)

    def _forget(self, session: PullerSession, reason: str) -> None:
        session.close()
        if session in self._sessions:
            del self._sessions[session]
            self._ended_reads += session.num_reads
            self._ended_bytes += session.sent_bytes
            logger.debug("session_ended puller=%s reason=%s", session.puller, reason)


def _from_hex(text: bytes) -> bytes:
    """The bytes that a text stands for; b"" when it is none of ours."""
    try:
        return bytes.fromhex(text.decode("ascii"))
    except ValueError:
        return b""
