"""Replies of a process of the user's own code, which code in it cannot forge by a descriptor.

    owner ── the key, then requests ──► the process
          ◄── a line a message: its signature, then JSON ──

The user's function may run code that a model wrote, with the descriptors of its process. So each
message is signed with a key. The owner sends the key before it has the process load anything, and
it is in no request: whoever reads the connection does not learn it. A reply also names its call.
What is not signed, or no reply to a call, counts for nothing.

The standard library alone, of Python 3.9 or later: `agents.python` runs this file without areal_sc.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Final

_KEY_BYTES: Final = 16
_SIGNATURE_CHARS: Final = 32
_MAX_LINE_BYTES: Final = 64 << 20


class Replies:
    """The process's side: it says what came of requests.

    Forks of the process lose the connection, so that none of them answers in its place.

    Args:
        connection: to the owner, which has not been read yet. The key is taken from it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._key = connection.recv(_KEY_BYTES, socket.MSG_WAITALL)
        self._pid = os.getpid()
        os.register_at_fork(after_in_child=self._forget)

    def send(self, *message: Any) -> None:
        """Sends a message: what it is, the number of its call, and more. Raises: OSError."""
        self._connection.sendall(self.signed(*message))

    def signed(self, *message: Any) -> bytes:
        """The message as it is sent."""
        return signed(message, self._key)

    def end_if_forked(self) -> None:
        """Behind user code: a fork that has come back from it must not go on as this process."""
        if os.getpid() != self._pid:
            os._exit(0)

    def _forget(self) -> None:
        self._key = b""
        with suppress(OSError):  # it is closed
            os.close(self._connection.detach())


class ReplyReader:
    """The owner's side: takes bytes, and gives the messages in them.

    Attributes:
        is_forged: something else than messages of the process has come.
    """

    def __init__(self) -> None:
        self.is_forged = False
        self._key = b""
        self._received = bytearray()
        self._num_searched = 0

    def new_key(self) -> bytes:
        """The key of all later messages, for the process."""
        self._key = secrets.token_bytes(_KEY_BYTES)
        return self._key

    def feed(self, received: bytes) -> None:
        """Raises: ConnectionResetError: a line has no end."""
        self._received += received
        if len(self._received) > _MAX_LINE_BYTES:
            raise ConnectionResetError

    def __iter__(self) -> Iterator[list[Any]]:
        while (end := self._received.find(b"\n", self._num_searched)) >= 0:
            line = bytes(self._received[:end])
            del self._received[: end + 1]
            self._num_searched = 0
            told, body = line[:_SIGNATURE_CHARS], line[_SIGNATURE_CHARS:]
            if hmac.compare_digest(told, _signature(body, self._key)):
                yield json.loads(body)
            elif line:
                self.is_forged = True
        self._num_searched = len(self._received)


def signed(message: Any, key: bytes = b"") -> bytes:
    """A line with a message; one before the key was sent is signed without one.

    It begins behind the end of a line, whatever others have written before it.
    """
    # half of a surrogate pair may stand in a text: JSON has an escape for it
    body = json.dumps(message).encode()
    return b"\n" + _signature(body, key) + body + b"\n"


def _signature(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=_SIGNATURE_CHARS // 2, key=key).hexdigest().encode()
