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
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

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
from areal_sc.transport.bulk.grant import BulkOptions, request_grant
from areal_sc.transport.bulk.request_queue import Asked, DescribeJob, FetchJob, RequestQueue
from areal_sc.transport.bulk.session import Session
from areal_sc.transport.bulk.stream import connect
from areal_sc.transport.bulk.wire import (
    Describe,
    Description,
    Failure,
    Found,
    Read,
    Reply,
    Request,
)
from areal_sc.transport.pull_plan import Owner
from areal_sc.transport.rpc.transport import Transport
from areal_sc.transport.sockets.refusals import Refusals

logger = logging.getLogger(__name__)

REOPEN_DELAY_S: Final = 0.2
MAX_REOPEN_DELAY_S: Final = 2.0
"""The third opening in a row waits for a while, and each further one longer: the owner may have
too many callers."""

LOOKS_PER_TIMEOUT: Final = 4
SILENT_LOOKS: Final = 2
"""After so many looks in a row that find nothing moved, the owner is asked for a new session. One
look alone may come just after a pause of this process, before what has arrived is read."""

_UNNAMED_ERRORS: Final = (PeerSilent, ProtocolError, RpcTimeout, TransportError)


class OwnerLink:
    """Begins to open the session at once. A `ReplyTaker`.

    Args:
        owner: whose shards are asked for.
        options: how.
        transport: gives the control connection, which hands over the session.
        pool: gives buffers.
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
        refused: Refusals,
        on_ended: Callable[[OwnerLink], None],
    ) -> None:
        self.owner = owner
        self._options = options
        self._transport = transport
        self._pool = pool
        self._refused = refused
        self._on_ended = on_ended
        self._loop = asyncio.get_running_loop()
        self._queue = RequestQueue(options.chunk_bytes)
        self._descriptions: deque[DescribeJob] = deque()
        self._is_pump_scheduled = False
        self._session: Session | None = None
        self._ended_bytes = 0
        self._num_openings = 0  # since the last reply
        self._last_loss = ""
        self._watch: asyncio.TimerHandle | None = None
        self._seen_bytes = -1
        self._num_silent_looks = 0
        self._connecting_s = 0.0
        self._connecting_since_s: float | None = None
        self._is_closed = False
        self._opening = self._begin_opening()

    @property
    def received_bytes(self) -> int:
        """Bytes of all replies."""
        return self._ended_bytes + (self._session.stream.received_bytes if self._session else 0)

    @property
    def connecting_s(self) -> float:
        """Seconds so far in which there was no connection, and one was made."""
        since_s = self._connecting_since_s
        return self._connecting_s + (0 if since_s is None else self._loop.time() - since_s)

    @property
    def trouble(self) -> str:
        """What has kept the owner's replies away lately, for the end of a message."""
        if not self._last_loss:
            return ""
        return f"; its connection was lost {self._num_openings} times, lastly: {self._last_loss}"

    def submit(self, job: FetchJob) -> None:
        """Its parts are asked for as credits allow."""
        self._queue.add(job)
        self._pump_soon()

    def abandon(self, job: FetchJob) -> None:
        """Nobody waits for the job any more; what it still wants is not asked for."""
        self._queue.forget(job)

    def submit_description(self, job: DescribeJob) -> None:
        self._descriptions.append(job)
        self._pump_soon()

    async def close(self) -> None:
        """Ends the session; what waits fails."""
        self._is_closed = True
        self._end("the connection was closed here")
        await asyncio.gather(self._opening, return_exceptions=True)

    def on_reply(self, asked: Asked | DescribeJob, reply: Reply) -> None:
        """Raises: ProtocolError: it does not answer what was asked."""
        self._num_openings, self._last_loss = 0, ""
        if isinstance(asked, DescribeJob):
            self._on_description(asked, reply)
        else:
            self._on_rows(asked, reply)
        self._pump_soon()

    def on_fault(self, asked: Asked | DescribeJob | None, error: ProtocolError) -> None:
        """What it answers fails; all that waits, where nobody knows what that is."""
        self._refused.add(error)
        if asked is not None:
            self._fail_asked(asked, error)
            self._pump_soon()
        else:
            self._fail_all(error)
            self._end(str(error))

    def on_lost(self, reason: str) -> None:
        """The connection ended."""
        self._open_again(reason)

    def _on_description(self, asked: DescribeJob, reply: Reply) -> None:
        match reply:
            case Description():
                if not asked.done.done():
                    asked.done.set_result(reply.fields)
            case Failure():
                self._fail_asked(asked, reply.error)
            case _:
                raise ProtocolError("expected the description of a shard, got its rows")

    def _on_rows(self, asked: Asked, reply: Reply) -> None:
        """The payload is in its place; what the owner says of its rows has to fit the metadata."""
        match reply:
            case Found() if len(reply.parts) == len(asked):
                for (job, part), held in zip(asked, reply.parts, strict=True):
                    try:
                        part.check(held.dtypes, held.row_lengths)
                    except ProtocolError as error:
                        job.fail(error)  # its metadata does not fit; the other pulls' may
                    job.arrived(part.num_bytes)
            case Failure() if reply.part < len(asked):
                # only the pull that asked for it fails; the others ask again
                asked[reply.part][0].fail(reply.error)
                self._queue.put_back(asked)
            case _:
                raise ProtocolError(f"not an answer to {len(asked)} parts: {reply!r:.200}")

    def _open_again(self, reason: str) -> None:
        """What was not answered is asked for once more, in a new session, if somebody waits."""
        self._last_loss = reason
        for asked in self._disconnect():
            if isinstance(asked, DescribeJob):
                self._descriptions.append(asked)
            else:
                self._queue.put_back(asked)
        is_wanted = self._queue or any(not job.done.done() for job in self._descriptions)
        if is_wanted and not self._is_closed:
            self._opening = self._begin_opening()
        else:
            self._end(reason)

    def _begin_opening(self) -> asyncio.Task[None]:
        self._num_openings += 1
        self._connecting_since_s = self._loop.time()
        opening = asyncio.create_task(self._open(), name=f"session with {self.owner.node_id}")
        opening.add_done_callback(self._on_opened)
        return opening

    async def _open(self) -> None:
        """Gets a session from the owner's control socket, and connects to its bulk socket."""
        delay_s = REOPEN_DELAY_S * max(0, self._num_openings - 2)
        await asyncio.sleep(min(delay_s, MAX_REOPEN_DELAY_S))
        try:
            grant = await request_grant(self._transport, self.owner, self._options)
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
            connection = await connect(grant.address)
        except ArealError as error:  # it lives: its control socket has just answered
            self._loop.call_soon(self._open_again, str(error))
            return
        self._connecting_s, self._connecting_since_s = self.connecting_s, None
        self._session = Session(connection, grant, self._options, self._pool, self)
        self._pump_soon()

    def _on_opened(self, opening: asyncio.Task[None]) -> None:
        """Whatever else ended it: nobody may wait for a session that never comes."""
        if not opening.cancelled() and (error := opening.exception()) is not None:
            self._end(f"no session with it: {error!r}")

    def _watch_owner(self) -> None:
        """As long as something is asked for, looks now and then whether anything arrives."""
        if self._watch is None:
            after_s = self._options.stalled_timeout_s / LOOKS_PER_TIMEOUT
            self._watch = self._loop.call_later(after_s, self._look)

    def _look(self) -> None:
        """An owner that lives answers; whether one that does not is gone, its control tells."""
        self._watch = None
        if self._session is None or not self._session.inflight:
            return
        is_silent = self.received_bytes == self._seen_bytes
        self._num_silent_looks = self._num_silent_looks + 1 if is_silent else 0
        self._seen_bytes = self.received_bytes
        if self._num_silent_looks < SILENT_LOOKS:
            self._watch_owner()
        else:
            self._num_silent_looks = 0
            self._open_again("it was silent")

    def _pump_soon(self) -> None:
        """Once a turn: what several pulls submit in one turn shares requests."""
        if self._session is not None and not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        try:
            while self._descriptions and self._has_credit:
                job = self._descriptions.popleft()
                if not job.done.done():
                    self._ask(Describe(job.shard_id), job)
            while self._queue and self._has_credit:
                if asked := self._queue.next_request():
                    self._ask(Read([part.asked for _, part in asked]), asked)
        except Exception as error:  # the boundary of the event loop: nobody may wait for ever
            logger.exception("no more requests to %s", self.owner.node_id)
            self._end(repr(error))

    @property
    def _has_credit(self) -> bool:
        return self._session is not None and self._session.has_credit

    def _ask(self, request: Request, asked: Asked | DescribeJob) -> None:
        assert self._session is not None
        try:
            self._session.ask(request, asked)
        except ProtocolError as error:  # its metadata holds what no message can
            self._fail_asked(asked, error)
            return
        if not isinstance(asked, DescribeJob):
            for job, _ in asked:
                job.sent_s = job.sent_s or self._loop.time()
        self._watch_owner()

    def _fail_asked(self, asked: Asked | DescribeJob, error: ArealError) -> None:
        jobs = [asked] if isinstance(asked, DescribeJob) else [job for job, _ in asked]
        for job in jobs:
            job.fail(self._named(error, job.shard_id))

    def _take_waiting(self) -> list[FetchJob | DescribeJob]:
        """All that waits for this owner; it waits no more."""
        waiting: list[FetchJob | DescribeJob] = [*self._descriptions, *self._queue.drain()]
        self._descriptions.clear()
        for asked in self._disconnect():
            if isinstance(asked, DescribeJob):
                waiting.append(asked)
            else:
                waiting += [job for job, _ in asked]
        return waiting

    def _fail_all(self, error: ArealError) -> None:
        for job in self._take_waiting():
            job.fail(self._named(error, job.shard_id))

    def _end(self, reason: str) -> None:
        """Nothing more comes from this owner; what waits fails, each naming its own shard."""
        self._on_ended(self)
        if self._watch is not None:
            self._watch.cancel()
        if self._opening is not asyncio.current_task():
            self._opening.cancel()
        for job in self._take_waiting():
            job.fail(
                ShardGone(
                    f"shard {job.shard_id} on {self.owner.node_id} is gone with its owner: {reason}"
                )
            )

    def _disconnect(self) -> list[Asked | DescribeJob]:
        """Ends the session, if there is one; returns what it has not answered."""
        session, self._session = self._session, None
        if session is None:
            return []
        session.stream.close()
        self._ended_bytes += session.stream.received_bytes
        unanswered = list(session.inflight.values())
        session.inflight.clear()  # whoever still knows the session keeps no pull's memory
        return unanswered

    def _named(self, error: ArealError, shard_id: str) -> ArealError:
        """The error with the shard and the owner, where it does not name them yet."""
        if shard_id in str(error) or type(error) not in _UNNAMED_ERRORS:
            return error
        return type(error)(f"shard {shard_id} on {self.owner.node_id}: {error}")
