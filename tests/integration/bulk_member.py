"""A member of the run that asks an owner for what it likes, with ZMQ's own hands.

The package reads bulk replies itself (`FrameStream`); here libzmq does, so that both are known to
speak the same protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import zmq

from areal_sc.transport.bulk.arrival import Arrival
from areal_sc.transport.bulk.buffer_pool import BufferPool
from areal_sc.transport.bulk.grant import SessionGrant
from areal_sc.transport.bulk.wire import TAG_BYTES, Sealer

TIMEOUT_MS = 20_000


class BulkMember:
    """A DEALER that shows the grant's ticket, or another one."""

    def __init__(self, grant: SessionGrant, ticket: tuple[str, str] | None = None) -> None:
        self.requests = Sealer(grant.session_id, grant.request_key, grant.is_encrypted)
        self._replies = Sealer(grant.session_id, grant.reply_key, grant.is_encrypted)
        name, password = ticket or grant.ticket
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.plain_username, self._dealer.plain_password = name.encode(), password.encode()
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.RCVTIMEO, TIMEOUT_MS)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        self._life = self._dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._dealer.connect(grant.address)

    @property
    def has_reply(self) -> bool:
        return bool(self._dealer.poll(0))

    @property
    def is_lost(self) -> bool:
        """The owner has ended the connection; true until the next look."""
        return bool(self._life.poll(0))

    def send(self, frames: Sequence[bytes]) -> None:
        self._dealer.send_multipart(frames)

    async def receive(self) -> list[bytes]:
        return await asyncio.to_thread(self._dealer.recv_multipart)

    async def ask(self, sequence: int, body: Any) -> tuple[list[Any], bytes]:
        """(reply body without tags, payload)."""
        self.send([self.requests.seal_header(sequence, body)])
        header, *frames = await self.receive()
        answer = self._replies.open_header(memoryview(header), sequence)
        place = bytearray(sum(len(frame) - TAG_BYTES for frame in frames))
        arrival = Arrival(self._replies, sequence, [memoryview(place)], BufferPool(0))
        for frame in frames:
            for part in arrival.places(len(frame)):
                part[:], frame = frame[: len(part)], frame[len(part) :]
            arrival.on_frame()
        return answer, bytes(place)

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._life.close(linger=0)
        self._dealer.close()
        self._context.term()
