"""A member of the run that asks an owner for what it likes, over a plain socket."""

from __future__ import annotations

import asyncio
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from areal_sc.transport.bulk.grant import SessionGrant
from areal_sc.transport.bulk.stream import framed
from areal_sc.transport.bulk.wire import Hello, Sealer

TIMEOUT_S = 20
HELLO = 0
"""Sequence number of the first request."""


class BulkMember:
    """Shows the grant's session at once, or sends what a test wants it to send first."""

    def __init__(self, grant: SessionGrant, first: bytes | None = None) -> None:
        self.requests = Sealer(grant.session_id, grant.request_key, grant.is_encrypted)
        self._replies = Sealer(grant.session_id, grant.reply_key, grant.is_encrypted)
        host, _, port = grant.address.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self.send(self.sealed(HELLO, Hello()) if first is None else first)

    @property
    def has_reply(self) -> bool:
        return self._peeked() not in (None, b"")

    @property
    def is_lost(self) -> bool:
        """The owner has ended the connection."""
        return self._peeked() == b""

    def sealed(self, sequence: int, body: Any) -> bytes:
        """The header of a request; the body may be anything that msgpack can hold."""
        return self.requests.seal(sequence, body)[0]

    def send(self, header: bytes, payload: Sequence[bytes] = ()) -> None:
        self._socket.sendall(b"".join(framed(header, payload)))

    def receive(self) -> tuple[bytes, bytes]:
        """Header and payload of the next reply."""
        lengths = struct.unpack("<II", self._exactly(8))
        header, payload = map(self._exactly, lengths)
        return header, payload

    async def ask(self, sequence: int, body: Any) -> tuple[list[Any], bytes]:
        """(reply body as a list, payload)."""
        self.send(self.sealed(sequence, body))
        header, payload = await asyncio.to_thread(self.receive)
        answer = msgspec.msgpack.decode(self._replies.open(header, sequence))
        if payload and self._replies.is_encrypted:
            plain = bytearray(len(payload))
            self._replies.decrypt_payload(header, sequence, payload, [memoryview(plain)])
            payload = bytes(plain)
        elif payload:
            self._replies.check_payload(header, sequence, [payload])
        return answer, payload

    def close(self) -> None:
        self._socket.close()

    def _peeked(self) -> bytes | None:
        """None: nothing has come; b"": nothing comes any more."""
        if not select.select([self._socket], [], [], 0)[0]:
            return None
        try:
            return self._socket.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return b""

    def _exactly(self, num_bytes: int) -> bytes:
        data = self._socket.recv(num_bytes, socket.MSG_WAITALL) if num_bytes else b""
        if len(data) < num_bytes:
            raise ConnectionError("the owner has ended the connection")
        return data
