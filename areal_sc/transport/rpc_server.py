"""The serving side of RPC: runs handlers as tasks, each request id at most once.

Consumes: requests and cancellations from the ROUTER socket. Each request waits for its handler,
then for room in its caller's queue. Unblocked by: the handler, a cancellation, the reply deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import zmq

from areal_sc.errors import (
    ArealError,
    IncarnationMismatch,
    PeerLost,
    ProtocolError,
    TransportError,
)
from areal_sc.transport.codec import Cancel, FrameLimits, Reply, Request, decode, encode
from areal_sc.transport.endpoint import Authenticator, Context, configure_socket
from areal_sc.transport.remote_errors import failure_of
from areal_sc.transport.replay_cache import FinishedRequest, ReplayCache
from areal_sc.transport.socket import AsyncSocket, Buffer, Frame

logger = logging.getLogger(__name__)

LAST_REPLIES_LINGER_S: Final = 1.0
"""How long a closing server goes on sending the replies that are already queued."""


@dataclass(frozen=True, slots=True)
class Frames:
    """A reply with payload: a msgpack-able header, and buffers that are sent without a copy.

    Such a reply is not kept for replay, so the method must be a read: a repeat runs it again.
    """

    header: Any
    buffers: Sequence[Buffer]


Handler = Callable[[dict[str, Any], list[Frame]], Awaitable[Any]]
"""Takes the arguments and payload frames; returns something msgpack-able, or `Frames`."""


@dataclass(slots=True)
class _Execution:
    """A running request.

    Attributes:
        callers: routing ids that wait for the reply; a repeat on another connection joins.
        handling: the task while it is inside the handler, so that a cancellation hits nothing else.
    """

    method: str
    callers: dict[bytes, None] = field(default_factory=dict)
    handling: asyncio.Task[Any] | None = None
    is_cancelled: bool = False


class RpcServer:
    """Serves `handlers` to callers that mean this incarnation.

    Args:
        handlers: method name -> coroutine function.
        node_id: the server's name, for messages.
        incarnation: this life of it.
        bind: ZMQ interface, with a system-chosen port unless it names one.
        max_running: requests executed at a time; more are refused.
        reply_timeout_s: how long a reply waits for a caller that does not read.

    Attributes:
        num_malformed: messages dropped because no correct peer sends them.
        num_dropped_replies: replies whose caller had left or did not read.
        bytes_sent, bytes_received: of all frames, headers included.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        *,
        node_id: str,
        incarnation: str,
        bind: str = "tcp://127.0.0.1",
        authenticator: Authenticator | None = None,
        limits: FrameLimits | None = None,
        max_running: int = 1024,
        reply_timeout_s: float = 30.0,
    ) -> None:
        self.node_id = node_id
        self.incarnation = incarnation
        self.num_malformed = 0
        self.num_dropped_replies = 0
        self.bytes_sent = 0
        self.bytes_received = 0
        self._handlers = dict(handlers)
        self._bind = bind if bind.count(":") == 2 else f"{bind}:0"
        self._authenticator = authenticator
        self._limits = limits or FrameLimits()
        self._max_running = max_running
        self._reply_timeout_s = reply_timeout_s
        self._running: dict[str, _Execution] = {}
        self._finished = ReplayCache()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False
        self._context: Context | None = None
        self._socket: AsyncSocket | None = None
        self._receiving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Starts to serve on the running event loop; returns the address to connect to.

        Raises: TransportError: the interface or port cannot be bound.
        """
        assert self._socket is None, "started twice"
        self._context = zmq.Context()
        raw = self._context.socket(zmq.ROUTER)
        configure_socket(raw, self._limits)
        # without it a message to a full or vanished peer is dropped without a word
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._authenticator is not None:
            self._authenticator.configure_server(raw)
        try:
            raw.bind(self._bind)
        except zmq.ZMQError as error:
            raw.close()
            self._context.term()
            raise TransportError(
                f"{self.node_id} cannot listen on {self._bind}: {error}"
            ) from error
        address = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = AsyncSocket(raw, max_parts=self._limits.max_frames + 2)
        self._receiving = asyncio.create_task(self._receive(), name=f"rpc of {self.node_id}")
        return address

    async def close(self) -> None:
        """Cancels what runs and stops serving; replies already queued are still sent."""
        if self._is_closing or not (self._socket and self._context and self._receiving):
            return
        self._is_closing = True
        tasks = [self._receiving, *self._tasks]
        for task in tasks:
            task.cancel()
        try:
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._socket.close(LAST_REPLIES_LINGER_S)
        await asyncio.to_thread(self._context.term)

    async def _receive(self) -> None:
        assert self._socket is not None
        while True:
            frames = await self._socket.recv_multipart()
            self.bytes_received += sum(map(len, frames))
            caller = bytes(frames[0])
            try:
                message = decode(frames[1:], self._limits)
                if isinstance(message, Request):
                    self._on_request(caller, message)
                elif isinstance(message, Cancel):
                    self._on_cancel(caller, message)
                else:
                    raise ProtocolError(f"a server takes no {type(message).__name__}")
            except ProtocolError as error:
                self._count_malformed(error)

    def _count_malformed(self, error: ProtocolError) -> None:
        self.num_malformed += 1
        if self.num_malformed.bit_count() == 1:  # the 1st, 2nd, 4th, 8th …: a flood stays readable
            logger.warning(
                "malformed_message node=%s count=%d error=%s",
                self.node_id,
                self.num_malformed,
                error,
            )

    def _on_request(self, caller: bytes, request: Request) -> None:
        running = self._running.get(request.request_id)
        finished = self._finished.get(request.request_id)
        refusal = self._refusal(request, running, finished)
        if refusal is not None:
            failure = failure_of(refusal, request.request_id)
            self._send_or_drop(caller, encode(failure, self._limits))
        elif running is not None:
            running.callers[caller] = None
        elif finished is not None and finished.reply is not None:
            self._send_or_drop(caller, finished.reply)
        else:
            execution = _Execution(request.method, {caller: None})
            self._running[request.request_id] = execution
            task = asyncio.create_task(self._execute(request, execution))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refusal(
        self, request: Request, running: _Execution | None, finished: FinishedRequest | None
    ) -> ArealError | None:
        """Why the request is neither executed nor answered from memory; None if it is."""
        if request.incarnation != self.incarnation:
            return IncarnationMismatch(
                f"{request.method} was meant for incarnation {request.incarnation} of "
                f"{self.node_id}, this is {self.incarnation}: it has been restarted"
            )
        earlier = running or finished
        if earlier is not None and earlier.method != request.method:
            return ProtocolError(
                f"request {request.request_id} called {earlier.method} before, "
                f"now {request.method}: request ids must be unique"
            )
        if finished is not None and finished.reply is None:
            return TransportError(
                f"{request.method} on {self.node_id} was executed under request id "
                f"{request.request_id}; its reply was too large to be kept"
            )
        if earlier is not None:
            return None
        if request.method not in self._handlers:
            return ProtocolError(
                f"{self.node_id} has no method {request.method!r}, it has {sorted(self._handlers)}"
            )
        if len(self._tasks) >= self._max_running:
            return TransportError(
                f"{self.node_id} is busy: it runs {len(self._tasks)} requests, the limit is "
                f"{self._max_running}; call again later"
            )
        return None

    def _on_cancel(self, caller: bytes, cancel: Cancel) -> None:
        execution = self._running.get(cancel.request_id)
        if execution is None or caller not in execution.callers:
            return
        del execution.callers[caller]
        if not execution.callers:
            execution.is_cancelled = True
            if execution.handling is not None:
                execution.handling.cancel()

    async def _execute(self, request: Request, execution: _Execution) -> None:
        try:
            reply = await self._handle(request, execution)
        finally:
            del self._running[request.request_id]
        for caller in execution.callers:
            await self._send(caller, reply)

    async def _handle(self, request: Request, execution: _Execution) -> list[Buffer]:
        """Runs the handler and keeps its reply, unless it is a bulk read."""
        is_bulk_read = False
        try:
            value = await self._run_handler(request, execution)
            if isinstance(value, Frames):
                is_bulk_read = True
                answer = Reply(request.request_id, value.header, value.buffers)
            else:
                answer = Reply(request.request_id, value)
            reply = encode(answer, self._limits)
        except asyncio.CancelledError:
            if self._is_closing:
                raise
            cancelled = TransportError(f"{request.method} on {self.node_id} was cancelled")
            reply = encode(failure_of(cancelled, request.request_id), self._limits)
        except Exception as error:  # the RPC boundary: whatever a method raises goes to its caller
            logger.warning(
                "method_failed node=%s method=%s request=%s error=%r",
                self.node_id,
                request.method,
                request.request_id,
                error,
            )
            reply = encode(failure_of(error, request.request_id), self._limits)
        if not is_bulk_read:
            self._finished.add(request.request_id, request.method, reply)
        return reply

    async def _run_handler(self, request: Request, execution: _Execution) -> Any:
        if execution.is_cancelled:  # before the task had its first turn
            raise asyncio.CancelledError
        execution.handling = asyncio.current_task()
        try:
            frames = [memoryview(frame) for frame in request.frames]
            return await self._handlers[request.method](request.args, frames)
        finally:
            execution.handling = None

    async def _send(self, caller: bytes, reply: Sequence[Buffer]) -> None:
        """Sends a reply, waiting a bounded time for room in the caller's queue."""
        assert self._socket is not None
        try:
            async with asyncio.timeout(self._reply_timeout_s):
                await self._socket.send_multipart([caller, *reply])
        except (PeerLost, TimeoutError) as error:
            self._count_dropped(caller, error)
        else:
            self.bytes_sent += sum(map(len, reply))

    def _send_or_drop(self, caller: bytes, reply: Sequence[Buffer]) -> None:
        """Sends a reply at once: what costs no execution may not pile up behind a full queue."""
        assert self._socket is not None
        try:
            if not self._socket.send_nowait([caller, *reply]):
                raise TimeoutError("the caller does not read")
        except (PeerLost, TimeoutError) as error:
            self._count_dropped(caller, error)
        else:
            self.bytes_sent += sum(map(len, reply))

    def _count_dropped(self, caller: bytes, error: Exception) -> None:
        self.num_dropped_replies += 1
        logger.info("reply_dropped node=%s caller=%s error=%r", self.node_id, caller.hex(), error)
