"""What pulls want of one owner, and the connection over which they get it.

    pulls        [ A A A A ... ]   [ b ]   [ c ]
    requests     [ A ] [ b c ] [ A ] [ A ] ...

consumes     transfers; replies of the owner's bulk socket
waits for    credit: at most `max_inflight_chunks` chunks are outstanding, and as much as `Credits`
             allow to all connections together; so nothing is queued anywhere that was not asked for
unblocked by the owner's replies, or the end of its connection

A connection that is lost, for whatever reason, is opened again through the owner's control socket,
as long as a pull waits. That socket also tells whether the owner is dead (nobody listens there any
more) or silent (it does not answer in time).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from areal_sc.config.transport_settings import TransportConfig
from areal_sc.errors import (
    ArealError,
    PeerLost,
    PeerSilent,
    ProtocolError,
    ServerBusy,
    ShardGone,
    TransportError,
)
from areal_sc.system.waiting import cancel_all
from areal_sc.transport.bulk.credits import Credits
from areal_sc.transport.bulk.messages import (
    FAILURE,
    FAILURES,
    HELLO,
    MAX_FAILURE_BYTES,
    MAX_REQUEST_FIELDS,
    MAX_REQUEST_ROWS,
    PREFIX,
    READ,
    ROWS,
    MessageCipher,
    decoded,
)
from areal_sc.transport.bulk.plan import Transfer
from areal_sc.transport.bulk.session import SessionGrant, ShardOwner
from areal_sc.transport.bulk.stream import MessageStream, connect
from areal_sc.transport.sockets.refusals import Refusals

logger = logging.getLogger(__name__)

MAX_REQUESTS: Final = 16
"""Outstanding at one owner: small pulls beyond share a request."""

REOPEN_DELAY_S: Final = 0.2
MAX_REOPEN_DELAY_S: Final = 2.0
"""The third opening in a row waits for a while, and each further one longer: the owner may have
too many callers."""

LOOKS_PER_TIMEOUT: Final = 4
SILENT_LOOKS: Final = 2
"""After so many looks in a row that find nothing moved, the owner is asked for a new session. One
look alone may come just after a pause of this process, before what has arrived is read."""


@dataclass(eq=False, slots=True)
class Fetch:
    """What one pull wants of one owner.

    Attributes:
        shard_id: one of its shards, for messages.
        waiting: not asked for yet.
        missing_bytes: not yet arrived.
    """

    shard_id: str
    waiting: deque[Transfer]
    missing_bytes: int
    done: asyncio.Future[None]

    def fail(self, error: ArealError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def arrived(self, num_bytes: int) -> None:
        self.missing_bytes -= num_bytes
        if self.missing_bytes == 0 and not self.done.done():
            self.done.set_result(None)


Request = list[tuple[Fetch, Transfer]]


class OwnerConnection:
    """Begins to open a session at once; ends when its connection does and nobody waits. A
    `MessageSink`.

    Args:
        owner: whose shards are asked for.
        config: how to ask.
        open_session: asks the owner's control socket.
        credits: shared with the connections to other owners.
        refused: counts replies that the owner cannot have sent.

    Attributes:
        is_ended: nothing more comes; a later pull needs another connection.
    """

    def __init__(
        self,
        owner: ShardOwner,
        config: TransportConfig,
        open_session: Callable[[], Awaitable[SessionGrant]],
        credits: Credits,
        refused: Refusals,
    ) -> None:
        self.owner = owner
        self.is_ended = False
        self._config = config
        self._open_session = open_session
        self._credits = credits
        self._refused = refused
        self._loop = asyncio.get_running_loop()
        self._fetches: deque[Fetch] = deque()  # of which not all was asked for, in turn
        self._unanswered: deque[Request] = deque()
        self._inflight_bytes = 0
        self._stream: MessageStream | None = None
        self._requests: MessageCipher  # this and `_replies`: of the newest session
        self._replies: MessageCipher
        self._content: Sequence[memoryview] = ()  # of the reply that arrives
        self._lost: asyncio.Future[Exception] = self._loop.create_future()
        self._num_openings = 0  # since the last reply
        self._last_loss = ""
        self._task = asyncio.create_task(self._run(), name=f"session with {owner.node_id}")

    @property
    def trouble(self) -> str:
        """What has kept the owner's replies away lately, for the end of a message."""
        if not self._last_loss:
            return ""
        return f"; its connection was lost {self._num_openings} times, lastly: {self._last_loss}"

    def submit(self, fetch: Fetch) -> None:
        """It is asked for as credits allow."""
        self._fetches.append(fetch)
        self._ask_soon()

    def abandon(self, fetch: Fetch) -> None:
        """Nobody waits for it any more; what it still wants is not asked for."""
        fetch.waiting.clear()
        if fetch in self._fetches:
            self._fetches.remove(fetch)

    async def close(self) -> None:
        """Ends the connection; what waits fails."""
        await cancel_all([self._task])

    def on_head(self, kind: int, num_bytes: int) -> Sequence[memoryview]:
        """Where the content of a reply goes. Raises: ProtocolError: it is no answer."""
        if not self._unanswered:
            raise ProtocolError("a reply that answers nothing")
        if kind == FAILURE and num_bytes <= MAX_FAILURE_BYTES:
            self._content = [memoryview(bytearray(num_bytes))]
        else:
            request = self._unanswered[0]
            self._content = [part for _, transfer in request for part in transfer.destinations]
            expected = _num_bytes(request)
            if kind != ROWS or num_bytes != expected:
                raise ProtocolError(f"expected {expected} bytes of payload, got {num_bytes}")
        return self._content

    def on_message(self, kind: int, tag: bytes) -> None:
        """A reply counts when all of it is verified. Raises: ProtocolError: it does not."""
        request, content = self._unanswered[0], self._content
        self._replies.open(kind, tag, content)
        failure = decoded(FAILURES, content[0]) if kind == FAILURE else None
        if failure is not None and failure.slice_number >= len(request):
            raise ProtocolError(f"not an answer to {len(request)} slices: {failure!r:.200}")
        self._unanswered.popleft()
        self._content = ()
        self._return_credit(_num_bytes(request))
        self._num_openings, self._last_loss = 0, ""
        if failure is None:
            for fetch, transfer in request:
                fetch.arrived(transfer.rows.num_bytes)
        else:  # only the pull that asked for it fails; the others ask again
            request[failure.slice_number][0].fail(failure.error)
            self._put_back(request)
        self._ask_soon()

    def on_lost(self, reason: Exception) -> None:
        """The connection ended. A reply that no correct owner sends fails what it should answer."""
        if isinstance(reason, ProtocolError):
            self._refused.add(reason)
            for fetch, _ in self._unanswered[0] if self._unanswered else ():
                fetch.fail(self._failure(reason, fetch.shard_id))
        if not self._lost.done():
            self._lost.set_result(reason)

    async def _run(self) -> None:
        """Keeps a connection; opens it again as long as a pull waits. Its end fails all pulls."""
        error: ArealError | str = "the connection was closed here"
        try:
            while True:
                await self._open()
                self._last_loss = str(await self._loss())
                self._disconnect()
                if not any(not fetch.done.done() for fetch in self._fetches):
                    break
        except ArealError as failure:
            error = failure
        except Exception as failure:
            logger.exception("no more requests to %s", self.owner.node_id)
            error = repr(failure)
        finally:
            self.is_ended = True
            self._disconnect()
            for fetch in self._fetches:
                fetch.fail(self._failure(error, fetch.shard_id))
            self._fetches.clear()

    async def _open(self) -> None:
        """Gets a session from the owner's control socket, and connects to its bulk socket.

        Raises: ArealError: there is no hope of a session.
        """
        while True:
            delay_s = REOPEN_DELAY_S * max(0, self._num_openings - 1)
            await asyncio.sleep(min(delay_s, MAX_REOPEN_DELAY_S))
            self._num_openings += 1
            try:
                grant = await self._open_session()
                connection = await connect(grant.address)
                break
            except (ServerBusy, OSError) as error:  # it lives: its control socket has answered
                self._last_loss = f"no connection: {error}"
        self._requests = MessageCipher(grant.request_key, grant.is_encrypted)
        self._replies = MessageCipher(grant.reply_key, grant.is_encrypted)
        self._lost = self._loop.create_future()
        stream = self._stream = MessageStream(connection, self)
        stream.send(partial(self._requests.seal, HELLO, [PREFIX + grant.session_id]))
        self._ask_soon()

    async def _loss(self) -> Exception:
        """Waits until the connection has ended, or the owner is silent; tells why."""
        after_s = self._config.stalled_peer_timeout_s / LOOKS_PER_TIMEOUT
        while True:
            if (await asyncio.wait([self._lost], timeout=after_s))[0]:
                return self._lost.result()
            assert self._stream is not None
            if self._stream.count_idle_looks() >= SILENT_LOOKS and self._unanswered:
                return PeerSilent("it was silent")

    def _disconnect(self) -> None:
        """What was not answered waits again."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None
        self._content = ()
        self._return_credit(self._inflight_bytes)
        while self._unanswered:
            self._put_back(self._unanswered.pop())

    def _put_back(self, request: Request) -> None:
        for fetch, transfer in reversed(request):
            if not fetch.done.done():
                fetch.waiting.appendleft(transfer)
                if fetch not in self._fetches:
                    self._fetches.append(fetch)

    def _ask_soon(self) -> None:
        if self._stream is not None:
            self._credits.want(self)

    def ask(self) -> int | None:
        """See `Asker`."""
        room = self._config.chunk_bytes * (self._config.max_inflight_chunks - 1)
        if (
            self._stream is None
            or len(self._unanswered) >= MAX_REQUESTS
            or self._inflight_bytes > room
            or not (request := self._next_request())
        ):
            return None
        num_bytes = _num_bytes(request)
        self._unanswered.append(request)
        self._inflight_bytes += num_bytes
        try:
            content = msgspec.msgpack.encode([transfer.rows for _, transfer in request])
            self._stream.send(partial(self._requests.seal, READ, [content]))
        except Exception as error:  # the boundary of the event loop: nobody may wait for ever
            if not self._lost.done():
                self._lost.set_exception(error)
        return num_bytes

    def _return_credit(self, num_bytes: int) -> None:
        self._inflight_bytes -= num_bytes
        self._credits.give_back(num_bytes)

    def _next_request(self) -> Request:
        """What the pulls want whose turn it is, up to the size of a request.

        Pulls take turns, so a small one does not wait for the end of a large one. Requests are made
        when there is credit, not when a pull begins, so small pulls share them.
        """
        request: Request = []
        room, rows, fields = self._config.chunk_bytes, MAX_REQUEST_ROWS, MAX_REQUEST_FIELDS
        while self._fetches:
            fetch = self._fetches.popleft()
            if fetch.done.done():  # it failed, or nobody waits for it any more
                continue
            while fetch.waiting:
                transfer = fetch.waiting[0]
                room -= transfer.rows.num_bytes
                rows -= transfer.rows.num_rows
                fields -= len(transfer.rows.fields)
                if min(room, rows, fields) < 0:
                    self._fetches.append(fetch)
                    return request
                request.append((fetch, fetch.waiting.popleft()))
        return request

    def _failure(self, error: ArealError | str, shard_id: str) -> ArealError:
        """What a pull of the shard raises; errors of a connection do not name it themselves."""
        where = f"shard {shard_id} on {self.owner.node_id}"
        if isinstance(error, PeerLost | str):
            return ShardGone(f"{where} is gone with its owner: {error}")
        if type(error) in (PeerSilent, ProtocolError, TransportError):
            return type(error)(f"{where}: {error}")
        return error


def _num_bytes(request: Request) -> int:
    return sum(transfer.rows.num_bytes for _, transfer in request)
