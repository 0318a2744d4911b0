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
from areal_sc.transport.sockets.zmq_socket import Frame

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

    def put(self, index: int, outcome: Any) -> None:
        if self.is_stopped:
            return  # the first error is the cause
        self.values[index] = outcome
        self._num_missing -= 1
        self.is_stopped = self._stops_at_error and isinstance(outcome, ArealError)
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
    frame: bytes = b""
    is_open: bool = True

    def settle(self, outcome: Any) -> None:
        """Args: outcome: the reply, or the error in its place."""
        if self.is_open:
            self.is_open = False
            self.outcomes.put(self.index, outcome)


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
        self.malformed = Refusals(logger, "malformed_reply", node_id)
        self._keeps_trying = keeps_trying
        self._term = term
        self._shown_pass = shown_pass
        self._pending: dict[str, _Call] = {}
        self._is_interrupted = False
        self._route = hub.connect(address, self, server_key)

    @property
    def is_lost(self) -> str | None:
        """Why the server is not reachable now; None while it is, or may still become so."""
        return self._route.is_lost

    async def call(self, method: Method[A, R], args: A, *, timeout_s: float) -> R:
        """Calls `method` and returns its reply.

        A call that passes its deadline or is cancelled here is cancelled there.

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
        [outcome] = await call_all([(self, args)], method, timeout_s=timeout_s)
        if isinstance(outcome, ArealError):
            raise outcome
        return outcome

    def fail_pending(self, error: ArealError) -> None:
        """Makes every call that waits now raise `error`; later calls are made as usual."""
        failed, self._pending = self._pending, {}
        for call in failed.values():
            call.settle(error)

    async def close(self) -> None:
        """Ends the connection; waiting calls raise PeerLost."""
        self._route.close()
        self.fail_pending(self._peer_lost("call ended"))

    def begin(self, call: _Call, args: Raw) -> None:
        """Sends a request, or has it sent once there is a connection.

        Raises: PeerLost: the server is gone. ProtocolError: the arguments are too large.
        """
        name = call.method.name
        call.frame = encode(
            Request(call.request_id, self.incarnation, name, args, self._term, self._shown_pass)
        )
        if self._route.is_closed or (self._route.is_lost is not None and not self._keeps_trying):
            raise self._peer_lost(f"{call.method.name} not sent")
        if not self._is_interrupted:
            self._send(call.frame)
        self._pending[call.request_id] = call

    def _send(self, frame: bytes) -> None:
        """Requests that wait are sent again when there is a connection. Raises: PeerLost."""
        if self._route.is_open:
            self._route.send(frame)
            self._route.hub.num_bytes += len(frame)

    def abandon(self, call: _Call) -> None:
        """Nobody waits any more: tells the server, as far as it can be reached at once."""
        if self._pending.pop(call.request_id, None) is not None:
            with suppress(PeerLost):
                self._send(encode(Cancel(call.request_id, self.incarnation)))

    def on_message(self, frames: Sequence[Frame]) -> None:
        """One reply; what no correct server sends is counted and dropped."""
        self._route.hub.num_bytes += sum(map(len, frames))
        try:
            message = decode(frames)
            if not isinstance(message, Reply | Failure):
                raise ProtocolError(f"a caller takes no {type(message).__name__}")
        except ProtocolError as error:
            self.malformed.add(error)
            return
        call = self._pending.pop(message.request_id, None)
        if call is None:
            return
        if isinstance(message, Failure):
            call.settle(error_of(message, node_id=self.node_id, method=call.method.name))
            return
        try:
            call.settle(call.method.read_reply(message.value))
        except ProtocolError as error:
            call.settle(error)

    def on_connected(self) -> None:
        """Requests were queued meanwhile; those of an earlier connection are sent again."""
        if self._is_interrupted:
            self._is_interrupted = False
            with suppress(PeerLost):  # the next connection is another attempt
                for call in self._pending.values():
                    self._send(call.frame)

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

    def _peer_lost(self, what: str) -> PeerLost:
        return PeerLost(f"{what}: {self.node_id} at {self.address} is lost: {self._route.is_lost}")


async def call_all(
    calls: Sequence[tuple[RpcClient, A]],
    method: Method[A, R],
    *,
    timeout_s: float,
    stops_at_error: bool = False,
) -> list[R | ArealError]:
    """Calls `method` on many peers at once; in the calls' order, what each returned or raised.

    The outcome of a call that failed is the error that `RpcClient.call` raises: the caller
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
        packed_args, packed = None, None
        for index, (client, args) in enumerate(calls):
            if index and index % CALLS_PER_TURN == 0:
                await asyncio.sleep(0)
            if outcomes.is_stopped:
                break
            call = _Call(outcomes, index, client, method, client.new_request_id())
            begun.append(call)
            try:
                if packed is None or args is not packed_args:
                    packed_args, packed = args, pack(args)
                client.begin(call, packed)
            except ArealError as error:
                call.settle(error)
        await outcomes.done
        late = [call for call in begun if call.is_open]
        for number, call in enumerate(late, start=1):
            client = call.client
            client.abandon(call)
            where = f"{method.name} on {client.node_id} ({client.address})"
            what = f"{where} gave no reply within {timeout_s:g} s"
            call.settle(RpcTimeout(what, silent=client.node_id))
            if number % CALLS_PER_TURN == 0:
                await asyncio.sleep(0)
    except asyncio.CancelledError:
        for call in begun:
            call.client.abandon(call)
        raise
    finally:
        deadline.cancel()
    return outcomes.values
