"""A member of the run that asks an owner for what it likes, over a plain socket."""

from __future__ import annotations

import asyncio
import select
import socket
from typing import Any

import msgspec

from areal_sc.transport.bulk.messages import (
    FAILURE,
    FAILURES,
    HEAD,
    HELLO,
    PREFIX,
    READ,
    MessageCipher,
    PullFailure,
    decoded,
)
from areal_sc.transport.bulk.session import SessionGrant

TIMEOUT_S = 60


def hello_of(grant: SessionGrant, key: bytes | None = None) -> bytes:
    """What shows the session; whoever has another key cannot make it."""
    cipher = MessageCipher(grant.request_key if key is None else key, grant.is_encrypted)
    return b"".join(cipher.seal(HELLO, [PREFIX + grant.session_id]))


class BulkMember:
    """Shows the grant's session at once, or sends what a test wants it to send first."""

    def __init__(self, grant: SessionGrant, first: bytes | None = None) -> None:
        self._requests = MessageCipher(grant.request_key, grant.is_encrypted)
        self._replies = MessageCipher(grant.reply_key, grant.is_encrypted)
        host, _, port = grant.address.removeprefix("tcp://").rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        hello = b"".join(self._requests.seal(HELLO, [PREFIX + grant.session_id]))
        self.send(hello if first is None else first)

    @property
    def has_reply(self) -> bool:
        return self._peeked() not in (None, b"")

    @property
    def is_lost(self) -> bool:
        """The owner has ended the connection."""
        return self._peeked() == b""

    def request(self, body: Any) -> bytes:
        """The next request as it is sent; the body may be anything that msgpack can hold."""
        return b"".join(self._requests.seal(READ, [msgspec.msgpack.encode(body)]))

    def send(self, message: bytes) -> None:
        self._socket.sendall(message)

    def receive(self) -> PullFailure | bytes:
        """The next reply: why it failed, or the bytes."""
        num_bytes, kind, tag = HEAD.unpack(self._exactly(HEAD.size))
        content = memoryview(bytearray(self._exactly(num_bytes)))
        self._replies.open(kind, tag, [content])
        return decoded(FAILURES, content) if kind == FAILURE else bytes(content)

    async def ask(self, body: Any) -> PullFailure | bytes:
        """The reply to a request."""
        self.send(self.request(body))
        return await asyncio.to_thread(self.receive)

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
