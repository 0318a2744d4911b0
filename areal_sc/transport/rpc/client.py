"""The calling side of RPC.

consumes     replies, and the life of the connection
waits for    the reply of each call
unblocked by that reply, the call's deadline, the loss of the peer, or `fail_pending`

The end of a connection says nothing of its server. A new one is made, and every request that waits
is sent again under its id: the server executes an id once, and replays its reply.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from msgspec import Raw

from areal_sc.errors import ArealError, PeerLost, ProtocolError, RpcTimeout
from areal_sc.transport.hub import PeerHub
from areal_sc.transport.refusals import Refusals
from areal_sc.transport.rpc.codec import (
    Cancel,
    Failure,
    MessageLimits,
    Reply,
    Request,
    decode,
    encode,
)
from areal_sc.transport.rpc.method import A, Method, R, pack
from areal_sc.transport.rpc.remote_errors import error_of
from areal_sc.transport.socket import Frame

logger = logging.getLogger(__name__)

_ID_PREFIX_BYTES: Final = 10

RequestIds = Callable[[], str]


def random_request_ids() -> RequestIds:
    """Gives ids that no other caller of the run gives: random digits of its own, and a count."""
    prefix, count = os.urandom(_ID_PREFIX_BYTES).hex(), itertools.count()
    return lambda: f"{prefix}-{next(count):x}"


@dataclass(slots=True)
class _Pending:
    """A request without a reply yet."""

    frame: bytes
    waiters: list[Waiter]


class Waiter(Protocol):
    """What a request's reply is for."""

    method: Method[Any, Any]

    def settle(self, value: Any) -> None: ...

    def fail(self, error: ArealError) -> None: ...


@dataclass(eq=False, slots=True)
class _Call:
    """One call that waits for its reply."""

    client: RpcClient
    method: Method[Any, Any]
    request_id: str
    timeout_s: float
    answer: asyncio.Future[Any]

    def settle(self, value: Any) -> None:
        if not self.answer.done():
            self.answer.set_result(value)

    def fail(self, error: ArealError) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)

    def expire(self) -> None:
        self.client.abandon(self.request_id, self)
        self.fail(self.client.timeout_error(self.method, self.timeout_s))


class RpcClient:
    """Calls one incarnation of one server. A `Peer` of the hub; see `ZmqTransport.connect`.

    Args:
        hub: connects, and carries the messages.
        address: the server's endpoint.
        node_id: its name, for messages.
        incarnation: the life of it that the calls are meant for; another one refuses them.
        new_request_id: gives ids that no other caller of the run uses.
        keeps_trying: somebody else finds out whether the server still lives, and calls
            `fail_pending` when it does not. Until then, or its deadline, no call fails because the
            server cannot be reached.

    Attributes:
        bytes_sent, bytes_received: of all frames.
    """

    def __init__(
        self,
        hub: PeerHub,
        address: str,
        *,
        node_id: str,
        incarnation: str,
        limits: MessageLimits,
        new_request_id: RequestIds,
        keeps_trying: bool = False,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.incarnation = incarnation
        self.bytes_sent = 0
        self.bytes_received = 0
        self._limits = limits
        self._new_request_id = new_request_id
        self._keeps_trying = keeps_trying
        self._pending: dict[str, _Pending] = {}
        self._is_interrupted = False
        self._repeating: asyncio.Task[None] | None = None
        self._malformed = Refusals(logger, "malformed_reply", node_id)
        self._loop = asyncio.get_running_loop()
        self._link = hub.connect(address, self)

    @property
    def num_malformed(self) -> int:
        """Messages dropped because no correct server sends them."""
        return self._malformed.num

    @property
    def is_lost(self) -> str | None:
        """Why the server is not reachable now; None while it is, or may still become so."""
        return self._link.is_lost

    async def call(
        self,
        method: Method[A, R],
        args: A,
        *,
        timeout_s: float,
        request_id: str | None = None,
    ) -> R:
        """Calls `method` and returns its reply.

        The server executes a request id at most once: repeating a call under its id joins it or
        replays its reply. A call that passes its deadline or is cancelled here is cancelled there.

        Raises:
            RpcTimeout: no reply within `timeout_s`.
            PeerLost: the server is gone: connections to it end, or cannot be made.
            IncarnationMismatch: the server is another incarnation than the one meant.
            ServerBusy: the server runs as much as it takes; a later call may succeed.
            ProtocolError: the arguments are too large, or arguments or reply are not of the
                declared types.
            RemoteError: the method raised; errors of `areal_sc.errors` arrive as themselves.
        """
        request_id = request_id or self._new_request_id()
        frame = self.frame_of(request_id, method, pack(args))
        call = _Call(self, method, request_id, timeout_s, self._loop.create_future())
        deadline = self._loop.call_later(timeout_s, call.expire)
        try:
            if not self.begin(request_id, frame, call):
                await self._send_when_possible(frame, call)
            reply: R = await call.answer
            return reply
        except asyncio.CancelledError:
            self.abandon(request_id, call)
            raise
        finally:
            deadline.cancel()
            if call.answer.done() and not call.answer.cancelled():
                call.answer.exception()  # it may have failed in the turn in which the wait ended

    def fail_pending(self, error: ArealError) -> None:
        """Makes every call that waits now raise `error`; later calls are made as usual."""
        failed, self._pending = self._pending, {}
        for pending in failed.values():
            for waiter in pending.waiters:
                waiter.fail(error)

    async def close(self) -> None:
        """Ends the connection; waiting calls raise PeerLost."""
        self._link.close()
        self._stop_repeating()
        self.fail_pending(self._peer_lost("call ended"))

    def frame_of(self, request_id: str, method: Method[Any, Any], args: Raw) -> bytes:
        """The request's frame around packed arguments. Raises: ProtocolError: it is too large."""
        return encode(Request(request_id, self.incarnation, method.name, args), self._limits)

    def begin(self, request_id: str, frame: bytes, waiter: Waiter) -> bool:
        """Sends a request whose reply is for `waiter`; False if it could not be sent yet.

        Raises: PeerLost: the server is gone; `waiter` hears nothing.
        """
        if self._link.is_closed or (self._link.is_lost is not None and not self._keeps_trying):
            raise self._peer_lost(f"{waiter.method.name} not sent")
        is_sent = self._is_interrupted or self.send(frame)
        pending = self._pending.get(request_id)
        if pending is None:
            self._pending[request_id] = _Pending(frame, [waiter])
        else:
            pending.waiters.append(waiter)
        return is_sent

    def send(self, frame: bytes) -> bool:
        """Queues a frame if there is room. Raises: PeerLost: the connection was closed."""
        if not (self._link.is_open or self._link.is_closed):
            return True  # requests that wait are sent when there is a connection again
        if not self._link.send_nowait((frame,)):
            return False
        self.bytes_sent += len(frame)
        return True

    def abandon(self, request_id: str, waiter: Waiter) -> None:
        """Nobody waits any more: tells the server, as far as it can be reached at once."""
        pending = self._pending.get(request_id)
        if pending is None or waiter not in pending.waiters:
            return
        pending.waiters.remove(waiter)
        if pending.waiters:
            return
        del self._pending[request_id]
        with suppress(PeerLost):
            self.send(encode(Cancel(request_id, self.incarnation), self._limits))

    def timeout_error(self, method: Method[Any, Any], timeout_s: float) -> RpcTimeout:
        """What a call raises that got no reply in time."""
        return RpcTimeout(
            f"{method.name} on {self.node_id} ({self.address}) gave no reply within {timeout_s:g} s"
        )

    def on_message(self, frames: Sequence[Frame]) -> None:
        """One reply; what no correct server sends is counted and dropped."""
        self.bytes_received += sum(map(len, frames))
        try:
            message = decode(frames, self._limits)
            if not isinstance(message, Reply | Failure):
                raise ProtocolError(f"a caller takes no {type(message).__name__}")
        except ProtocolError as error:
            self._malformed.add(error)
            return
        pending = self._pending.pop(message.request_id, None)
        for waiter in pending.waiters if pending else ():
            if isinstance(message, Failure):
                waiter.fail(error_of(message, node_id=self.node_id, method=waiter.method.name))
                continue
            try:
                waiter.settle(waiter.method.read_reply(message.value))
            except ProtocolError as error:
                waiter.fail(error)

    def on_connected(self) -> None:
        """Requests were queued meanwhile; those of an earlier connection are sent again."""
        if self._is_interrupted:
            self._is_interrupted = False
            self._stop_repeating()
            self._repeating = self._loop.create_task(
                self._repeat_all(), name=f"requests of {self.node_id} are repeated"
            )

    def on_interrupted(self) -> None:
        """Whatever waits may have been lost on its way."""
        self._is_interrupted = True

    def on_lost(self, reason: str) -> None:
        """Calls that wait raise PeerLost, unless somebody else decides that."""
        self._is_interrupted = True
        if self._keeps_trying:
            logger.warning("node=%s cannot be reached: %s", self.node_id, reason)
        else:
            self.fail_pending(self._peer_lost("call ended"))

    async def _repeat_all(self) -> None:
        for request_id, pending in list(self._pending.items()):
            if self._pending.get(request_id) is pending:
                try:
                    await self._link.send((pending.frame,))
                except PeerLost:
                    return  # the next connection is another attempt
                self.bytes_sent += len(pending.frame)

    def _stop_repeating(self) -> None:
        if self._repeating is not None:
            self._repeating.cancel()
            self._repeating = None

    async def _send_when_possible(self, frame: bytes, call: _Call) -> None:
        """Waits for room in the connection's queue, unless the call fails before."""
        sending = asyncio.create_task(self._link.send((frame,)))
        try:
            waits: set[asyncio.Future[Any]] = {sending, call.answer}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and sending.exception() is None:  # else it is sent again later
                self.bytes_sent += len(frame)
        finally:
            sending.cancel()

    def _peer_lost(self, what: str) -> PeerLost:
        return PeerLost(f"{what}: {self.node_id} at {self.address} is lost: {self._link.is_lost}")
