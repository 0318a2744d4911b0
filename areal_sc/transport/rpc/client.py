"""The calling side of RPC.

consumes     the calls; replies, and the life of the connections
waits for    one future for all calls that are made together, which counts down their replies
unblocked by the last reply or failure, the deadline, the loss of a peer, or `fail_pending`

The end of a connection says nothing of its server. A new one is made, and every request that waits
is sent again under its id: the server executes an id once, and replays its reply. A task, a future
and a timer for each of thousands of calls would cost twice as much as the messages themselves.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from msgspec import Raw

from areal_sc.errors import ArealError, PeerLost, ProtocolError, RpcTimeout
from areal_sc.transport.rpc.codec import Cancel, Failure, Reply, Request, decode, encode, error_of
from areal_sc.transport.rpc.method import A, Method, R, pack
from areal_sc.transport.sockets.hub import PeerHub
from areal_sc.transport.sockets.refusals import Refusals
from areal_sc.transport.sockets.zmq_socket import SEND_RETRY_S, Frame

logger = logging.getLogger(__name__)

CALLS_PER_TURN: Final = 64
"""Calls begun, or given up, without giving the event loop a turn: about a millisecond."""

_ID_PREFIX_BYTES: Final = 10

RequestIds = Callable[[], str]


def random_request_ids() -> RequestIds:
    """Gives ids that no other caller of the run gives: random digits of its own, and a count."""
    prefix, count = os.urandom(_ID_PREFIX_BYTES).hex(), itertools.count()
    return lambda: f"{prefix}-{next(count):x}"


class _Outcomes:
    """The outcomes of calls that are made together, in their order.

    Attributes:
        done: set once none is missing, or one ends all.
        is_stopped: a call failed, and the others do not matter any more.
    """

    def __init__(self, num_calls: int, *, stops_at_error: bool) -> None:
        self.values: list[Any] = [None] * num_calls
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_stopped = False
        self._num_missing = num_calls
        self._stops_at_error = stops_at_error

    def put(self, index: int, outcome: Any, *, is_error: bool) -> None:
        if self.is_stopped:
            return  # the first error is the cause
        self.values[index] = outcome
        self._num_missing -= 1
        self.is_stopped = is_error and self._stops_at_error
        if self._num_missing == 0 or self.is_stopped:
            self.finish()

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(eq=False, slots=True)
class _Call:
    """One call that waits for its reply."""

    outcomes: _Outcomes
    index: int
    client: RpcClient
    method: Method[Any, Any]
    request_id: str
    is_open: bool = True

    def settle(self, value: Any) -> None:
        if self.is_open:
            self.is_open = False
            self.outcomes.put(self.index, value, is_error=False)

    def fail(self, error: ArealError) -> None:
        if self.is_open:
            self.is_open = False
            self.outcomes.put(self.index, error, is_error=True)

    def abandon(self) -> None:
        if self.is_open:
            self.client.abandon(self)


@dataclass(slots=True)
class _Pending:
    """A request without a reply yet."""

    frame: bytes
    calls: list[_Call]


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
        server_key: see `Route`.
        shown_pass: of the worker that calls.
        term: of the controller that calls; 0: a worker does.

    Attributes:
        bytes_sent, bytes_received: of all frames.
        malformed: messages dropped because no correct server sends them.
    """

    def __init__(
        self,
        hub: PeerHub,
        address: str,
        *,
        node_id: str,
        incarnation: str,
        new_request_id: RequestIds,
        keeps_trying: bool = False,
        server_key: str = "",
        shown_pass: bytes = b"",
        term: int = 0,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.incarnation = incarnation
        self.new_request_id = new_request_id
        self.bytes_sent = 0
        self.bytes_received = 0
        self.malformed = Refusals(logger, "malformed_reply", node_id)
        self._keeps_trying = keeps_trying
        self._term = term
        self._shown_pass = shown_pass
        self._pending: dict[str, _Pending] = {}
        self._is_interrupted = False
        self._repeating: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._route = hub.connect(address, self, server_key)

    @property
    def is_lost(self) -> str | None:
        """Why the server is not reachable now; None while it is, or may still become so."""
        return self._route.is_lost

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
            NotPermitted: the caller is none of those that may call this.
            IncarnationMismatch: the server is another incarnation than the one meant.
            StaleTerm: the server has been called by a controller of a later term.
            ServerBusy: the server runs as much as it takes; a later call may succeed.
            ProtocolError: the arguments are too large, or arguments or reply are not of the
                declared types.
            RemoteError: the method raised; errors of `areal_sc.errors` arrive as themselves.
        """
        [outcome] = await call_all(
            [(self, args)], method, timeout_s=timeout_s, request_id=request_id
        )
        if isinstance(outcome, ArealError):
            raise outcome
        return outcome

    def fail_pending(self, error: ArealError) -> None:
        """Makes every call that waits now raise `error`; later calls are made as usual."""
        failed, self._pending = self._pending, {}
        for pending in failed.values():
            for call in pending.calls:
                call.fail(error)

    async def close(self) -> None:
        """Ends the connection; waiting calls raise PeerLost."""
        self._route.close()
        self._stop_repeating()
        self.fail_pending(self._peer_lost("call ended"))

    def begin(self, call: _Call, args: Raw) -> bytes | None:
        """Sends a request; returns its frame if it could not be sent yet.

        Raises: PeerLost: the server is gone. ProtocolError: the arguments are too large.
        """
        name = call.method.name
        frame = encode(
            Request(call.request_id, self.incarnation, name, args, self._term, self._shown_pass)
        )
        if self._route.is_closed or (self._route.is_lost is not None and not self._keeps_trying):
            raise self._peer_lost(f"{call.method.name} not sent")
        is_sent = self._is_interrupted or self.send(frame)
        self._pending.setdefault(call.request_id, _Pending(frame, [])).calls.append(call)
        return None if is_sent else frame

    def send(self, frame: bytes) -> bool:
        """Queues a frame if there is room. Raises: PeerLost: the connection was closed."""
        if not (self._route.is_open or self._route.is_closed):
            return True  # requests that wait are sent when there is a connection again
        if not self._route.send_nowait((frame,)):
            return False
        self.bytes_sent += len(frame)
        return True

    def abandon(self, call: _Call) -> None:
        """Nobody waits any more: tells the server, as far as it can be reached at once."""
        pending = self._pending.get(call.request_id)
        if pending is None or call not in pending.calls:
            return
        pending.calls.remove(call)
        if not pending.calls:
            del self._pending[call.request_id]
            with suppress(PeerLost):
                self.send(encode(Cancel(call.request_id, self.incarnation)))

    def on_message(self, frames: Sequence[Frame]) -> None:
        """One reply; what no correct server sends is counted and dropped."""
        self.bytes_received += sum(map(len, frames))
        try:
            message = decode(frames)
            if not isinstance(message, Reply | Failure):
                raise ProtocolError(f"a caller takes no {type(message).__name__}")
        except ProtocolError as error:
            self.malformed.add(error)
            return
        pending = self._pending.pop(message.request_id, None)
        for call in pending.calls if pending else ():
            if isinstance(message, Failure):
                call.fail(error_of(message, node_id=self.node_id, method=call.method.name))
                continue
            try:
                call.settle(call.method.read_reply(message.value))
            except ProtocolError as error:
                call.fail(error)

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
            # without a call that waits it may as well have ended as it should
            level = logging.WARNING if self._pending else logging.INFO
            logger.log(level, "node=%s cannot be reached: %s", self.node_id, reason)
        else:
            self.fail_pending(self._peer_lost("call ended"))

    async def _repeat_all(self) -> None:
        for request_id, pending in list(self._pending.items()):
            try:
                while self._pending.get(request_id) is pending:
                    if self.send(pending.frame):
                        break
                    await asyncio.sleep(SEND_RETRY_S)
            except PeerLost:
                return  # the next connection is another attempt

    def _stop_repeating(self) -> None:
        if self._repeating is not None:
            self._repeating.cancel()
            self._repeating = None

    def _peer_lost(self, what: str) -> PeerLost:
        return PeerLost(f"{what}: {self.node_id} at {self.address} is lost: {self._route.is_lost}")


async def call_all(
    calls: Sequence[tuple[RpcClient, A]],
    method: Method[A, R],
    *,
    timeout_s: float,
    stops_at_error: bool = False,
    request_id: str | None = None,
) -> list[R | ArealError]:
    """Calls `method` on many peers at once; in the calls' order, what each returned or raised.

    The outcome of a call that failed is its error, as `RpcClient.call` would raise it: the caller
    decides what it means for the others, or says beforehand with `stops_at_error` that the first
    error ends all: calls without a reply are cancelled then, and their outcomes mean nothing.
    Arguments that are one and the same object are encoded once. A cancellation is passed on to all
    servers that have not answered.
    """
    if not calls:
        return []
    outcomes = _Outcomes(len(calls), stops_at_error=stops_at_error)
    begun: list[_Call] = []
    deadline = asyncio.get_running_loop().call_later(timeout_s, outcomes.finish)
    try:
        unsent = []
        packed_args, packed = None, None
        for index, (client, args) in enumerate(calls):
            if index and index % CALLS_PER_TURN == 0:
                await asyncio.sleep(0)
            if outcomes.is_stopped:
                break
            call = _Call(outcomes, index, client, method, request_id or client.new_request_id())
            begun.append(call)
            try:
                if packed is None or args is not packed_args:
                    packed_args, packed = args, pack(args)
                frame = client.begin(call, packed)
                if frame is not None:
                    unsent.append((call, frame))
            except ArealError as error:
                call.fail(error)
        while unsent and not outcomes.done.done():  # queues are full
            await asyncio.wait((outcomes.done,), timeout=SEND_RETRY_S)
            unsent = [(call, frame) for call, frame in unsent if not _is_settled(call, frame)]
        await outcomes.done
        late = [call for call in begun if call.is_open]
        for number, call in enumerate(late, start=1):
            call.abandon()
            client = call.client
            call.fail(
                RpcTimeout(
                    f"{method.name} on {client.node_id} ({client.address}) gave no reply within "
                    f"{timeout_s:g} s",
                    silent=client.node_id,
                )
            )
            if number % CALLS_PER_TURN == 0:
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        for call in begun:
            call.abandon()
        raise
    finally:
        deadline.cancel()
    return outcomes.values


def _is_settled(call: _Call, frame: bytes) -> bool:
    """Whether the request needs no further attempt to send it."""
    try:
        return not call.is_open or call.client.send(frame)
    except ArealError as error:
        call.fail(error)
        return True
