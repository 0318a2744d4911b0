"""The serving side of RPC: each request id is executed at most once.

consumes     requests and cancellations from the ROUTER socket
waits for    nothing: a request runs in a task of its own, or is answered at once
unblocked by the end of the handler, or a cancellation by its caller
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any, Final

import zmq

from areal_sc.errors import (
    ArealError,
    IncarnationMismatch,
    NotPermitted,
    PeerLost,
    ProtocolError,
    ServerBusy,
    TransportError,
)
from areal_sc.system.waiting import cancel_all
from areal_sc.transport.rpc.codec import (
    ANY_INCARNATION,
    MAX_FRAMES,
    Cancel,
    Reply,
    Request,
    decode,
    encode,
    failure_of,
)
from areal_sc.transport.rpc.method import Served, pack
from areal_sc.transport.rpc.newest_term import NewestTerm
from areal_sc.transport.security.curve import CurveServer, Guard
from areal_sc.transport.security.passes import Caller
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import AsyncSocket, Context, Frame, configure_socket
from areal_sc.user_code import describe

logger = logging.getLogger(__name__)

LAST_REPLIES_LINGER_S: Final = 1.0
"""How long a closing server goes on sending the replies that are already queued."""

MAX_FIRST_BYTES: Final = 16 << 10
"""A longer message is not read of somebody who has not shown yet who it is."""

_ENTRY_BYTES: Final = 300
"""What an entry takes beside its reply: the id, the tuple, the dict's slot."""


@dataclass(slots=True)
class _Execution:
    """A running request.

    Attributes:
        callers: routing ids that the reply is sent to; a repeat on another connection joins. Those
            of connections that ended stay, and are told in vain.
        num_bytes: of the request.
    """

    callers: set[bytes]
    num_bytes: int
    task: asyncio.Task[Any]


class ReplayCache:
    """Replies of the newest finished requests by id, in at most `max_bytes` of memory.

    A reply over `max_reply_bytes` is forgotten at once, and None stands for it: a repeat is
    refused, not executed.
    """

    def __init__(self, *, max_bytes: int = 16 << 20, max_reply_bytes: int = 256 << 10) -> None:
        self._max_bytes = max_bytes
        self._max_reply_bytes = max_reply_bytes
        self._finished: OrderedDict[str, bytes | None] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._finished)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._finished

    def __getitem__(self, request_id: str) -> bytes | None:
        return self._finished[request_id]

    def add(self, request_id: str, reply: bytes) -> None:
        assert request_id not in self._finished
        kept = reply if len(reply) <= self._max_reply_bytes else None
        self._finished[request_id] = kept
        self.num_bytes += _ENTRY_BYTES + len(kept or b"")
        while self.num_bytes > self._max_bytes:
            _, oldest = self._finished.popitem(last=False)
            self.num_bytes -= _ENTRY_BYTES + len(oldest or b"")


class RpcServer:
    """Serves methods to callers that mean this incarnation.

    Args:
        methods: those that it serves.
        node_id: the server's name, for messages.
        incarnation: this life of it.
        bind: ZMQ interface, with a system-chosen port unless it names one.
        security: knows who calls, and keeps strangers out; None: everyone is the controller.
        max_running: requests executed at a time; more are refused with `ServerBusy`. One that
            generates a group stays for minutes, so it is far above what controllers ask for.
        max_running_bytes: of these requests.
        term: newest one of a controller that is known already.

    Attributes:
        newest_term: of a controller; those of an earlier one are refused.
        malformed: messages dropped because no correct peer sends them.
    """

    def __init__(
        self,
        methods: Iterable[Served],
        *,
        node_id: str,
        incarnation: str,
        bind: str = "tcp://127.0.0.1",
        security: CurveServer | None = None,
        max_running: int = 16_384,
        max_running_bytes: int = 256 << 20,
        term: int = 0,
    ) -> None:
        self.newest_term = NewestTerm(term)
        self.node_id = node_id
        self.incarnation = incarnation
        self._served = {served.method.name: served for served in methods}
        self._bind = bind if bind.rpartition(":")[2].isdecimal() else f"{bind}:0"
        self._security = security
        self._callers = {} if security is None else security.callers.known
        self._max_running = max_running
        self._max_running_bytes = max_running_bytes
        self.malformed = Refusals(logger, "malformed_message", node_id)
        self._running: dict[str, _Execution] = {}
        self._num_running_bytes = 0
        self._finished = ReplayCache()
        self._is_closing = False
        self._context: Context | None = None
        self._guard: Guard | None = None
        self._socket: AsyncSocket | None = None

    async def start(self, *, at_any_port: bool = False) -> str:
        """Starts to serve on the running event loop; returns the address to connect to.

        Args:
            at_any_port: any will do, if another process has the one that was wanted.
        Raises: TransportError: the interface or port cannot be bound.
        """
        assert self._socket is None, "started twice"
        self._context = zmq.Context()
        raw = self._context.socket(zmq.ROUTER)
        configure_socket(raw)
        # without it a message to a full or vanished peer is dropped without a word
        raw.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._security is not None:
            self._guard = self._security.configure(self._context, raw)
        try:
            raw.setsockopt(zmq.IPV6, "[" in self._bind)
            try:
                raw.bind(self._bind)
            except zmq.ZMQError:
                if not at_any_port:
                    raise
                raw.bind(f"{self._bind.rpartition(':')[0]}:0")
        except zmq.ZMQError as error:
            if self._guard is not None:
                self._guard.close()
            raw.close()
            self._context.term()
            raise TransportError(
                f"{self.node_id} cannot listen on {self._bind}: {error}"
            ) from error
        address = raw.getsockopt_string(zmq.LAST_ENDPOINT)
        self._socket = AsyncSocket(
            raw,
            self._on_message,
            max_parts=1 + MAX_FRAMES,
            knows_senders=self._guard is not None,
        )
        return address

    async def close(self) -> None:
        """Cancels what runs and stops serving; replies already queued are still sent."""
        if self._is_closing or not (self._context and self._socket):
            return
        self._is_closing = True
        try:
            await cancel_all(execution.task for execution in self._running.values())
        finally:
            if self._guard is not None:
                self._guard.close()
            self._socket.close(LAST_REPLIES_LINGER_S)
        await _terminated(self._context)

    def _on_message(self, frames: Sequence[Frame]) -> None:
        if self._is_closing:
            return
        assert self._socket is not None
        routing_id, sender = bytes(frames[0]), self._socket.sender
        caller = Caller.controller if self._security is None else self._callers.get(sender)
        num_bytes = sum(map(len, frames[1:]))
        if caller is None and num_bytes > MAX_FIRST_BYTES:
            self._refuse(f"a stranger sends {num_bytes} bytes")
            return
        try:
            message = decode(frames[1:])
            if type(message) is Request:
                if caller is Caller.controller or self._admits(routing_id, sender, message):
                    self._on_request(routing_id, sender, message, num_bytes)
            elif type(message) is Cancel:  # of whichever connection: an id is one caller's
                if message.request_id in self._running and caller is not None:
                    self._running[message.request_id].task.cancel()
            else:
                raise ProtocolError(f"a server takes no {type(message).__name__}")
        except ProtocolError as error:
            self.malformed.add(error)

    def _admits(self, routing_id: bytes, sender: str, request: Request) -> bool:
        """Whether a request is executed that is not the controller's; a stranger gets no answer."""
        assert self._security is not None
        request.term = 0  # which a controller alone may say
        served = self._served.get(request.method)
        try:
            caller = self._security.callers.find(sender, request.shown_pass)
            if caller is None:
                self._refuse("a caller shows neither a key nor a pass of the run")
            elif served is None or caller not in served.method.callers:
                raise NotPermitted(f"a {caller} may not call {request.method} of {self.node_id}")
            return caller is not None
        except NotPermitted as denial:
            self._refuse(denial)
            self._send(routing_id, encode(failure_of(denial, request.request_id)))
            return False

    def _refuse(self, reason: object) -> None:
        assert self._security is not None
        self._security.refused.add(reason)

    def _on_request(self, routing_id: bytes, sender: str, request: Request, num_bytes: int) -> None:
        running = self._running.get(request.request_id)
        error = self._refusal(request, num_bytes)
        if error is not None:
            self._send(routing_id, encode(failure_of(error, request.request_id)))
        elif running is not None:
            running.callers.add(routing_id)
        elif request.request_id in self._finished:
            self._send(routing_id, self._finished[request.request_id] or b"")
        else:
            self._execute(routing_id, sender, request, num_bytes)

    def _refusal(self, request: Request, num_bytes: int) -> ArealError | None:
        """Why the request is neither executed nor answered as before; None if it is."""
        method, request_id = request.method, request.request_id
        is_finished = request_id in self._finished
        stale = self.newest_term.refusal(request.term)
        if stale is not None:
            return stale
        if request.incarnation not in (self.incarnation, ANY_INCARNATION):
            return IncarnationMismatch(
                f"{method} was meant for incarnation {request.incarnation} of {self.node_id}, this "
                f"is {self.incarnation}: it has been restarted"
            )
        if is_finished and self._finished[request_id] is None:
            return TransportError(
                f"{method} on {self.node_id} was executed under request id {request_id}; its reply "
                "was too large to be kept"
            )
        if method not in self._served:
            return ProtocolError(
                f"{self.node_id} has no method {method!r}, it has {sorted(self._served)}"
            )
        is_full = (
            len(self._running) >= self._max_running
            or self._num_running_bytes + num_bytes > self._max_running_bytes
        )
        if is_full and not is_finished and request_id not in self._running:
            return ServerBusy(
                f"{self.node_id} is busy: it runs {len(self._running)} requests of "
                f"{self._num_running_bytes} bytes, the limits are {self._max_running} and "
                f"{self._max_running_bytes}; call {method} again later"
            )
        return None

    def _execute(self, routing_id: bytes, sender: str, request: Request, num_bytes: int) -> None:
        served = self._served[request.method]
        try:
            args = served.method.read_args(request.args)
            outcome = served.handler(args, sender) if served.takes_key else served.handler(args)
        except Exception as error:  # the RPC boundary: whatever a method raises goes to its caller
            self._finish(request, [routing_id], self._failure(request, error))
            return
        if not isinstance(outcome, CoroutineType):
            self._finish(request, [routing_id], self._reply(request, outcome))
            return
        task = asyncio.create_task(outcome)
        self._running[request.request_id] = _Execution({routing_id}, num_bytes, task)
        self._num_running_bytes += num_bytes
        task.add_done_callback(partial(self._on_executed, request))

    def _on_executed(self, request: Request, task: asyncio.Task[Any]) -> None:
        execution = self._running.pop(request.request_id)
        self._num_running_bytes -= execution.num_bytes
        if task.cancelled():
            if self._is_closing:
                return  # its callers learn it from the end of the connection
            cancelled = TransportError(f"{request.method} on {self.node_id} was cancelled")
            reply = encode(failure_of(cancelled, request.request_id))
        elif (error := task.exception()) is not None:
            reply = self._failure(request, error)
        else:
            reply = self._reply(request, task.result())
        self._finish(request, execution.callers, reply)

    def _finish(self, request: Request, callers: Iterable[bytes], reply: bytes) -> None:
        self._finished.add(request.request_id, reply)
        for caller in callers:
            self._send(caller, reply)

    def _send(self, caller: bytes, reply: bytes) -> None:
        assert self._socket is not None
        with suppress(PeerLost):  # it has left
            self._socket.send([caller, reply])

    def _reply(self, request: Request, value: Any) -> bytes:
        try:
            return encode(Reply(request.request_id, pack(value)))
        except ProtocolError as error:
            return self._failure(request, error)

    def _failure(self, request: Request, error: BaseException) -> bytes:
        logger.warning(
            "method_failed node=%s method=%s request=%s error=%s",
            self.node_id,
            request.method,
            request.request_id,
            describe(error),
        )
        return encode(failure_of(error, request.request_id))


async def _terminated(context: Context) -> None:
    """Ends it in a thread of its own: a script that ends has no pool of threads any more."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        context.term()
        with suppress(RuntimeError):  # nobody waits: the loop is closed
            loop.call_soon_threadsafe(done.set)

    threading.Thread(target=terminate, name="end of sockets").start()
    await done.wait()
