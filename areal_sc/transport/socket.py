"""An asyncio ZMQ socket that is driven from its file descriptor.

Consumes: readiness of the socket's FD. Waits for: a message to read, or room to write one.
Unblocked by: ZMQ's I/O thread, which signals the FD. The FD is edge-triggered in effect: every
send or receive may swallow the signal, so the waiting side is polled again after each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import zmq

from areal_sc.errors import PeerLost

Frame = memoryview
"""One received frame: read-only bytes, valid as long as the view lives; nothing was copied."""

Buffer = bytes | bytearray | memoryview

RECEIVES_PER_TURN: Final = 32
"""Messages taken without giving the event loop a turn; a full inbox must not starve timers."""

SEND_RETRY_S: Final = 0.01
"""A ROUTER is "writable" as long as any peer has room, so waiting for one full peer also polls."""


class AsyncSocket:
    """One ZMQ socket on the running event loop; one task may receive, any number may send.

    Args:
        socket: configured and bound or connected; owned from here on.
        max_parts: parts kept of one message; further ones are read and thrown away, so that the
            decoder sees `max_parts + 1` and refuses the message.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, max_parts: int = 1024) -> None:
        self._socket = socket
        self._max_parts = max_parts
        self._loop = asyncio.get_running_loop()
        self._receiver: asyncio.Future[None] | None = None
        self._senders: list[asyncio.Future[None]] = []
        self._received_this_turn = 0
        self._is_closed = False
        self._fd = socket.fileno()
        self._loop.add_reader(self._fd, self._on_signal)

    async def recv_multipart(self) -> list[Frame]:
        """The next message, as one view per part."""
        if self._received_this_turn >= RECEIVES_PER_TURN:
            self._received_this_turn = 0
            await asyncio.sleep(0)
        while True:
            parts = self.recv_nowait()
            if parts is not None:
                self._received_this_turn += 1
                return parts
            self._received_this_turn = 0
            self._receiver = self._loop.create_future()
            try:
                await self._receiver
            finally:
                self._receiver = None

    def recv_nowait(self) -> list[Frame] | None:
        """The next message, or None when there is none."""
        try:
            part = self._socket.recv(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return None
        parts = [part.buffer]
        while part.more:
            part = self._socket.recv(zmq.DONTWAIT, copy=False)
            if len(parts) <= self._max_parts:
                parts.append(part.buffer)
        if self._senders:
            self._wake_senders()
        return parts

    async def send_multipart(self, frames: Sequence[Buffer]) -> None:
        """Queues a message, waiting while the peer's queue is at its high-water mark.

        Large frames are not copied: their memory must stay unchanged until it is sent.

        Raises: PeerLost: a ROUTER's peer is gone, or this socket was closed.
        """
        while not self.send_nowait(frames):
            waiter: asyncio.Future[None] = self._loop.create_future()
            self._senders.append(waiter)
            retry = self._loop.call_later(SEND_RETRY_S, self._wake_senders)
            try:
                await waiter
            finally:
                retry.cancel()
                if waiter in self._senders:
                    self._senders.remove(waiter)

    def send_nowait(self, frames: Sequence[Buffer]) -> bool:
        """Queues a message if there is room; tells whether it did.

        Raises: PeerLost: a ROUTER's peer is gone, or this socket was closed.
        """
        if self._is_closed:
            raise PeerLost("the socket is closed")
        try:
            self._socket.send_multipart(frames, zmq.DONTWAIT, copy=False)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerLost("the peer has disconnected") from None
            raise
        finally:
            self._wake_receiver()  # sent or not, the attempt may have swallowed its signal
        return True

    def close(self, linger_s: float = 0.0) -> None:
        """Closes the socket; messages not sent after `linger_s` are dropped.

        A waiting sender gets PeerLost; a waiting receiver must be cancelled by its owner.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._fd)
        self._wake_senders()
        self._socket.close(linger=round(linger_s * 1000))

    def _on_signal(self) -> None:
        if self._events() & zmq.POLLOUT:
            self._wake_senders()
        self._wake_receiver()

    def _wake_receiver(self) -> None:
        receiver = self._receiver
        if receiver is not None and not receiver.done() and self._events() & zmq.POLLIN:
            receiver.set_result(None)

    def _events(self) -> int:
        """What is possible now; asking resets the FD's signal."""
        events = self._socket.getsockopt(zmq.EVENTS)
        assert isinstance(events, int)
        return events

    def _wake_senders(self) -> None:
        senders, self._senders = self._senders, []
        for waiter in senders:
            if not waiter.done():
                waiter.set_result(None)
