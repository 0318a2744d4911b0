"""The session of a puller with one owner, and what waits for it.

consumes     the segments of pulls; replies of the owner's bulk socket
waits for    credit: at most `max_inflight_chunks` chunks are outstanding, so nothing is queued
             anywhere that was not asked for
unblocked by the owner's replies, or the end of its connection

A session that is lost, for whatever reason, is opened again through the owner's control socket, as
long as a pull waits. That socket also tells whether the owner is dead (nobody listens there any
more) or silent (it does not answer in time).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from areal_sc.errors import (
    ArealError,
    PeerLost,
    PeerSilent,
    ProtocolError,
    RpcTimeout,
    ServerBusy,
    ShardGone,
    TransportError,
)
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.frame_stream import FrameStream
from areal_sc.transport.bulk.grant import request_grant
from areal_sc.transport.bulk.handshake import connect
from areal_sc.transport.bulk.jobs import BulkOptions, Description, FetchJob
from areal_sc.transport.bulk.reader import DESCRIBE, READ
from areal_sc.transport.bulk.replies import Reply, ReplyReader
from areal_sc.transport.bulk.request_queue import Asked, RequestQueue
from areal_sc.transport.bulk.turns import Turns
from areal_sc.transport.bulk.wire import Sealer, failure_of_body
from areal_sc.transport.pull_plan import Owner
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.transport import Transport

logger = logging.getLogger(__name__)

REOPEN_DELAY_S: Final = 0.2
MAX_REOPEN_DELAY_S: Final = 2.0
"""The third opening in a row waits for a while, and each further one longer: the owner may have
too many callers."""

LOOKS_PER_TIMEOUT: Final = 4
SILENT_LOOKS: Final = 2
"""After so many looks in a row that find nothing moved, the owner is asked for a new session. One
look alone may come just after a pause of this process, before what has arrived is read."""

MAX_REQUESTS: Final = 8
"""Outstanding at one owner: small pulls beyond share a request."""

_UNNAMED_ERRORS: Final = (PeerSilent, ProtocolError, RpcTimeout, TransportError)


class OwnerLink:
    """Begins to open the session at once.

    Args:
        owner: whose shards are asked for.
        options: how.
        transport: gives the control connection, which hands over the session.
        pool: gives buffers.
        turns: those of all bulk connections on the event loop.
        refused: counts replies that the owner cannot have sent.
        on_ended: called when nothing more comes from this owner.
    """

    def __init__(
        self,
        owner: Owner,
        options: BulkOptions,
        transport: Transport,
        *,
        pool: BufferPool,
        turns: Turns,
        refused: Refusals,
        on_ended: Callable[[OwnerLink], None],
    ) -> None:
        self.owner = owner
        self._options = options
        self._transport = transport
        self._pool = pool
        self._turns = turns
        self._refused = refused
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._queue = RequestQueue(options.request_bytes)
        self._descriptions: deque[Description] = deque()
        self._inflight: dict[int, Asked | Description] = {}
        self._inflight_bytes = 0
        self._sequence = itertools.count(1)
        self._is_pump_scheduled = False
        self._stream: FrameStream | None = None
        self._replies: ReplyReader | None = None
        self._requests: Sealer | None = None
        self._ended_bytes = 0
        self._num_openings = 0  # since the last reply
        self._last_loss = ""
        self._watch: asyncio.TimerHandle | None = None
        self._seen: tuple[FrameStream | None, int] = (None, 0)
        self._num_silent_looks = 0
        self._is_closed = False
        self._opening = self._begin_opening()

    @property
    def received_bytes(self) -> int:
        """Bytes of all reply frames."""
        return self._ended_bytes + (self._replies.received_bytes if self._replies else 0)

    def submit(self, job: FetchJob) -> None:
        """Its parts are asked for as credits allow."""
        self._queue.add(job)
        self._pump_soon()

    def abandon(self, job: FetchJob) -> None:
        """Nobody waits for the job any more; what it still wants is not asked for."""
        self._queue.forget(job)

    def submit_description(self, description: Description) -> None:
        self._descriptions.append(description)
        self._pump_soon()

    async def close(self) -> None:
        """Ends the session; what waits fails."""
        self._is_closed = True
        self._end("the connection was closed here")
        await asyncio.gather(self._opening, return_exceptions=True)

    @property
    def trouble(self) -> str:
        """What has kept the owner's replies away lately, for the end of a message."""
        if not self._last_loss:
            return ""
        return f"; its connection was lost {self._num_openings} times, lastly: {self._last_loss}"

    def _on_lost(self, reason: str) -> None:
        self._stream = None
        self._open_again(reason)

    def _open_again(self, reason: str) -> None:
        """What was not answered is asked for once more, in a new session, if somebody waits."""
        self._last_loss = reason
        self._close_stream()
        lost = list(self._inflight.values())
        self._forget_inflight()
        for asked in lost:
            if isinstance(asked, Description):
                self._descriptions.append(asked)
            else:
                self._queue.put_back(asked)
        is_wanted = self._queue or any(not asked.fields.done() for asked in self._descriptions)
        if is_wanted and not self._is_closed:
            self._opening = self._begin_opening()
        else:
            self._end(reason)

    def _destinations(self, sequence: int) -> list[memoryview]:
        """Where the payload of a reply goes. Raises: ProtocolError: nothing was asked so."""
        asked = self._inflight.get(sequence)
        if asked is None:
            raise ProtocolError(f"reply {sequence} answers nothing that was asked")
        if isinstance(asked, Description):
            return []
        return [place for _, part in asked for place in part.destinations]

    def _on_reply(self, reply: Reply) -> None:
        """All of it was checked; only now it counts."""
        self._num_openings, self._last_loss = 0, ""
        asked = self._inflight.pop(reply.sequence, None)
        if asked is None:
            assert reply.error is not None
            self._refused.add(reply.error)
            self._fail_all(reply.error)  # one of them was answered so: nobody knows which
            self._end(str(reply.error))
            return
        self._count(asked, -1)
        try:
            if reply.error is not None:
                raise reply.error
            if isinstance(asked, Description):
                self._on_description(asked, reply.body)
            elif isinstance(reply.body, list) and reply.body[:1] == [0]:
                self._on_payload(asked, reply.body)
            else:
                self._on_failure(asked, reply.body)
        except ProtocolError as error:
            self._refused.add(error)
            self._fail_asked(asked, error)
        self._pump_soon()

    def _begin_opening(self) -> asyncio.Task[None]:
        self._num_openings += 1
        opening = asyncio.create_task(self._open(), name=f"session with {self.owner.node_id}")
        opening.add_done_callback(self._on_opened)
        return opening

    async def _open(self) -> None:
        """Gets a session from the owner's control socket, and connects to its bulk socket."""
        owner, options = self.owner, self._options
        delay_s = REOPEN_DELAY_S * max(0, self._num_openings - 2)
        await asyncio.sleep(min(delay_s, MAX_REOPEN_DELAY_S))
        try:
            grant = await request_grant(self._transport, owner, options)
            self._requests = Sealer(grant.session_id, grant.request_key, grant.is_encrypted)
            self._ended_bytes = self.received_bytes
            self._replies = ReplyReader(
                grant,
                options.chunk_bytes,
                self._pool,
                destinations=self._destinations,
                on_reply=self._on_reply,
                on_lost=self._on_lost,
            )
        except PeerLost as error:
            self._end(str(error))
            return
        except ServerBusy as error:
            self._loop.call_soon(self._open_again, str(error))
            return
        except ArealError as error:
            self._fail_all(error)
            self._end(str(error))
            return
        try:
            connection = await connect(grant.address, grant.ticket)
        except ArealError as error:  # it lives: its control socket has just answered
            self._loop.call_soon(self._open_again, str(error))
            return
        self._stream = FrameStream(
            connection, self._replies, self._turns, window_bytes=options.inflight_bytes
        )
        self._pump_soon()

    def _on_opened(self, opening: asyncio.Task[None]) -> None:
        """Whatever else ended it: nobody may wait for a session that never comes."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._end(f"no session with it: {error!r}")

    def _watch_owner(self) -> None:
        """As long as something is asked for, looks now and then whether anything moves."""
        if self._watch is None:
            after_s = self._options.stalled_timeout_s / LOOKS_PER_TIMEOUT
            self._watch = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        """An owner that lives answers, or pings; one that is stopped or cut off does neither."""
        self._watch = None
        if self._stream is None or not self._inflight:
            return
        seen = self._stream, self._stream.moved_bytes
        self._num_silent_looks = self._num_silent_looks + 1 if seen == self._seen else 0
        self._seen = seen
        if self._num_silent_looks < SILENT_LOOKS:
            self._watch_owner()
        else:
            self._open_again("it was silent")

    def _pump_soon(self) -> None:
        """Once a turn: what several pulls submit in one turn shares requests."""
        if self._stream is not None and not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        try:
            self._send_waiting()
        except Exception as error:  # the boundary of the event loop: nobody may wait for ever
            logger.exception("no more requests to %s", self.owner.node_id)
            self._end(repr(error))

    def _send_waiting(self) -> None:
        while self._descriptions and self._has_credit and self._stream is not None:
            description = self._descriptions.popleft()
            if not description.fields.done():
                self._send([DESCRIBE, description.shard_id], description)
        while self._queue and self._has_credit and self._stream is not None:
            if chunk := self._queue.next_request():
                self._send([READ, [part.to_wire() for _, part in chunk]], chunk)

    @property
    def _has_credit(self) -> bool:
        options = self._options
        room = options.inflight_bytes - self._inflight_bytes
        return len(self._inflight) < MAX_REQUESTS and room >= options.request_bytes

    def _count(self, asked: Asked | Description, sign: int) -> None:
        """A request was sent (+1), or answered (-1)."""
        if not isinstance(asked, Description):
            self._inflight_bytes += sign * sum(part.num_bytes for _, part in asked)

    def _send(self, body: Any, asked: Asked | Description) -> None:
        assert self._stream is not None
        assert self._requests is not None
        sequence = next(self._sequence)
        try:
            request = self._requests.seal_header(sequence, body)
        except ProtocolError as error:  # its metadata holds what no message can
            self._fail_asked(asked, error)
            return
        self._inflight[sequence] = asked
        self._count(asked, 1)
        self._watch_owner()
        self._stream.send([([request], False)])

    def _on_description(self, asked: Description, body: Any) -> None:
        match body:
            case [0, [*fields]]:
                if not asked.fields.done():
                    asked.fields.set_result(fields)
            case [1, int(), str(name), str(message)]:
                self._fail_asked(asked, failure_of_body(name, message))
            case _:
                raise ProtocolError(f"not a description of a shard: {body!r:.200}")

    def _on_payload(self, chunk: Asked, body: Any) -> None:
        """The payload is in its place; what the owner says of its rows has to fit the metadata."""
        match body:
            case [0, [*held]] if len(held) == len(chunk):
                for (job, part), found in zip(chunk, held, strict=True):
                    try:
                        part.check(found)
                    except ProtocolError as error:
                        job.fail(error)  # its metadata does not fit; the other pulls' may
                    job.arrived(part.num_bytes)
            case _:
                raise ProtocolError(f"not an answer to {len(chunk)} segments: {body!r:.200}")

    def _on_failure(self, chunk: Asked, body: Any) -> None:
        match body:
            case [1, int(number), str(name), str(message)] if 0 <= number < len(chunk):
                # only the pull that asked for it fails; the others ask again
                chunk[number][0].fail(failure_of_body(name, message))
                self._queue.put_back(chunk)
            case _:
                raise ProtocolError(f"not an answer to {len(chunk)} segments: {body!r:.200}")

    def _fail_asked(self, asked: Asked | Description, error: ArealError) -> None:
        if not isinstance(asked, Description):
            for job, _ in asked:
                job.fail(self._named(error, job.shard_id))
        elif not asked.fields.done():
            asked.fields.set_exception(self._named(error, asked.shard_id))

    def _fail_all(self, error: ArealError) -> None:
        waiting: list[Asked | Description] = [*self._inflight.values(), *self._descriptions]
        for asked in waiting:
            self._fail_asked(asked, error)
        for job in self._queue.drain():
            job.fail(self._named(error, job.shard_id))
        self._forget_inflight()
        self._descriptions.clear()

    def _end(self, reason: str) -> None:
        """Nothing more comes from this owner; what waits fails, each naming its own shard."""
        self._on_ended(self)
        self._close_stream()
        if self._watch is not None:
            self._watch.cancel()
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        jobs = self._queue.drain()
        for asked in [*self._inflight.values(), *self._descriptions]:
            if isinstance(asked, Description):
                self._fail_asked(asked, self._gone(asked.shard_id, reason))
            else:
                jobs += [job for job, _ in asked]
        for job in jobs:
            job.fail(self._gone(job.shard_id, reason))
        self._forget_inflight()
        self._descriptions.clear()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _forget_inflight(self) -> None:
        self._inflight.clear()
        self._inflight_bytes = 0

    def _named(self, error: ArealError, shard_id: str) -> ArealError:
        """The error with the shard and the owner, where it does not name them yet."""
        if shard_id in str(error) or type(error) not in _UNNAMED_ERRORS:
            return error
        return type(error)(f"shard {shard_id} on {self.owner.node_id}: {error}")

    def _gone(self, shard_id: str, reason: str) -> ShardGone:
        return ShardGone(
            f"shard {shard_id} on {self.owner.node_id} is gone with its owner: {reason}"
        )
