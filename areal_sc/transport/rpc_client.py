"""The calling side of RPC.

Consumes: replies, and the life events of the connection. A call waits for its reply; it is
unblocked by that reply, by its deadline, by the loss of the peer, or by `fail_pending`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final
from uuid import uuid4

import zmq
from zmq.utils.monitor import parse_monitor_message

from areal_sc.errors import PeerLost, ProtocolError, RpcTimeout
from areal_sc.transport.codec import Cancel, Failure, FrameLimits, Reply, Request, decode, encode
from areal_sc.transport.endpoint import Authenticator, Context, configure_socket
from areal_sc.transport.remote_errors import error_of
from areal_sc.transport.socket import AsyncSocket, Buffer, Frame

logger = logging.getLogger(__name__)

REFUSALS_UNTIL_LOST: Final = 3
"""Failed attempts (0.1 s and 0.2 s apart) before a peer that was never reached counts as gone. An
address is only known once its server listens, so a refusal is not a matter of waiting longer."""

_LIFE_EVENTS: Final = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

RequestIds = Callable[[], str]


def random_request_id() -> str:
    """32 hexadecimal digits, unique among all callers of a run."""
    return uuid4().hex


class RpcClient:
    """Calls one incarnation of one server; must be made on a running event loop.

    Args:
        address: the server's ZMQ endpoint.
        node_id: its name, for messages.
        incarnation: the life of it that the calls are meant for; another one refuses them.
        context: shared ZMQ context; the client's own one when None.
        new_request_id: gives ids that no other caller of the run uses.
    """

    def __init__(
        self,
        address: str,
        *,
        node_id: str,
        incarnation: str,
        context: Context | None = None,
        authenticator: Authenticator | None = None,
        limits: FrameLimits | None = None,
        new_request_id: RequestIds = random_request_id,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.incarnation = incarnation
        self._limits = limits or FrameLimits()
        self._new_request_id = new_request_id
        self._bytes_sent = 0
        self._bytes_received = 0
        self._pending: dict[str, list[asyncio.Future[Reply | Failure]]] = {}
        self._lost: str | None = None  # why the peer is not reachable now
        self._num_refusals = 0
        self._is_closed = False
        self._own_context: Context | None = None
        if context is None:
            context = self._own_context = zmq.Context()
        raw = context.socket(zmq.DEALER)
        configure_socket(raw, self._limits)
        raw.setsockopt(zmq.RECONNECT_IVL, 100)
        raw.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        if authenticator is not None:
            authenticator.configure_client(raw)
        self._raw = raw
        self._monitor = AsyncSocket(raw.get_monitor_socket(_LIFE_EVENTS))
        self._socket = AsyncSocket(raw, max_parts=self._limits.max_frames + 1)
        self._tasks = [
            asyncio.create_task(self._receive_replies(), name=f"replies of {node_id}"),
            asyncio.create_task(self._watch_peer(), name=f"life of {node_id}"),
        ]
        raw.connect(address)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all frames sent, headers included."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes of all frames received, headers included."""
        return self._bytes_received

    async def call(
        self, method: str, args: dict[str, Any], *, timeout_s: float, request_id: str | None = None
    ) -> Any:
        """Calls `method` and returns its value; see `call_frames`."""
        value, frames = await self.call_frames(
            method, args, timeout_s=timeout_s, request_id=request_id
        )
        if frames:
            raise ProtocolError(
                f"{method} on {self.node_id}: expected no payload frames, got {len(frames)}"
            )
        return value

    async def call_frames(
        self,
        method: str,
        args: dict[str, Any],
        *,
        timeout_s: float,
        frames: Sequence[Buffer] = (),
        request_id: str | None = None,
    ) -> tuple[Any, list[Frame]]:
        """Calls `method` with payload frames; returns its value and the frames of the reply.

        The server executes a request id at most once: repeating a call under its id joins it or
        replays its reply. A call that passes its deadline or is cancelled here is cancelled there.

        Raises:
            RpcTimeout: no reply within `timeout_s`.
            PeerLost: the connection ended before the reply, or could not be made.
            IncarnationMismatch: the server is another incarnation than the one meant.
            ProtocolError: the arguments are not msgpack-able or too large.
            RemoteError: the method raised; errors of `areal_sc.errors` arrive as themselves.
        """
        request_id = request_id or self._new_request_id()
        wire = encode(Request(request_id, self.incarnation, method, args, frames), self._limits)
        if self._lost is not None:
            raise self._peer_lost(f"{method} not sent")
        reply: asyncio.Future[Reply | Failure] = asyncio.get_running_loop().create_future()
        self._pending.setdefault(request_id, []).append(reply)
        deadline = asyncio.timeout(timeout_s)
        answer: Reply | Failure
        try:
            async with deadline:
                if not self._socket.send_nowait(wire):
                    await self._send_when_possible(wire, reply)
                self._bytes_sent += sum(map(len, wire))
                answer = await reply
        except TimeoutError:
            if not deadline.expired():
                raise
            self._abandon(request_id, reply)
            raise RpcTimeout(
                f"{method} on {self.node_id} ({self.address}) gave no reply within {timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            self._abandon(request_id, reply)
            raise
        finally:
            self._forget(request_id, reply)
        if isinstance(answer, Failure):
            raise error_of(answer, node_id=self.node_id, method=method)
        return answer.value, [memoryview(frame) for frame in answer.frames]

    def fail_pending(self, error: Exception) -> None:
        """Makes every call that waits now raise `error`; later calls are made as usual."""
        for replies in self._pending.values():
            for reply in replies:
                if not reply.done():
                    reply.set_exception(error)

    async def close(self) -> None:
        """Ends the connection; waiting calls raise PeerLost."""
        if self._is_closed:
            return
        self._is_closed = True
        self._lost = "the connection was closed here"
        self.fail_pending(self._peer_lost("call ended"))
        for task in self._tasks:
            task.cancel()
        # all of it before the first await: a close that is cancelled may not leave a socket open
        while self._monitor.recv_nowait() is not None:
            pass
        # before its reader closes: ZMQ sends a last event, and would wait for room forever
        self._raw.disable_monitor()
        self._monitor.close()
        self._socket.close()
        if self._own_context is not None:
            self._own_context.term()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send_when_possible(
        self, wire: Sequence[Buffer], reply: asyncio.Future[Reply | Failure]
    ) -> None:
        """Waits for the connection or for room in its queue, unless the call fails before."""
        sending = asyncio.create_task(self._socket.send_multipart(wire))
        try:
            waits: set[asyncio.Future[Any]] = {sending, reply}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            sending.cancel()

    def _abandon(self, request_id: str, reply: asyncio.Future[Reply | Failure]) -> None:
        """Tells the server, as far as it can be reached at once, that nobody waits any more."""
        if self._lost is not None or self._pending.get(request_id) != [reply]:
            return
        wire = encode(Cancel(request_id, self.incarnation), self._limits)
        with contextlib.suppress(PeerLost):
            if self._socket.send_nowait(wire):
                self._bytes_sent += sum(map(len, wire))

    def _forget(self, request_id: str, reply: asyncio.Future[Reply | Failure]) -> None:
        replies = self._pending[request_id]
        replies.remove(reply)
        if not replies:
            del self._pending[request_id]
        if reply.done() and not reply.cancelled():
            reply.exception()  # a call that was cancelled meanwhile never looks at it

    async def _receive_replies(self) -> None:
        while True:
            self._on_reply(await self._socket.recv_multipart())

    def _on_reply(self, frames: Sequence[Frame]) -> None:
        self._bytes_received += sum(map(len, frames))
        try:
            message = decode(frames, self._limits)
        except ProtocolError as error:
            logger.warning("malformed_reply node=%s error=%s", self.node_id, error)
            return
        if not isinstance(message, Reply | Failure):
            logger.warning(
                "unexpected_message node=%s kind=%s", self.node_id, type(message).__name__
            )
            return
        for reply in self._pending.get(message.request_id, ()):
            if not reply.done():
                reply.set_result(message)

    async def _watch_peer(self) -> None:
        """Turns the connection's life events into PeerLost for the calls that wait."""
        was_connected = False
        while True:
            frames = await self._monitor.recv_multipart()
            event = parse_monitor_message([bytes(frame) for frame in frames])["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                was_connected, self._lost, self._num_refusals = True, None, 0
            elif event == zmq.EVENT_DISCONNECTED:
                self._lose("the connection ended")
            elif event == zmq.EVENT_CLOSED and not was_connected:
                self._num_refusals += 1
                if self._num_refusals == REFUSALS_UNTIL_LOST:
                    self._lose(f"it refused the connection {REFUSALS_UNTIL_LOST} times")

    def _lose(self, reason: str) -> None:
        # replies that arrived before the end are still in the inbox
        while (frames := self._socket.recv_nowait()) is not None:
            self._on_reply(frames)
        self._lost = reason
        self.fail_pending(self._peer_lost("call ended"))
        # a new connection instead of ZMQ's own reconnection, which would deliver the requests
        # that are still queued; their calls have just failed. (IMMEDIATE would drop them too, but
        # ZMQ 4.3 then also loses the last of many replies that arrived before the end.)
        self._raw.disconnect(self.address)
        self._raw.connect(self.address)

    def _peer_lost(self, what: str) -> PeerLost:
        return PeerLost(f"{what}: {self.node_id} at {self.address} is lost: {self._lost}")
