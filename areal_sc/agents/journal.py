"""What is written down of a session of an agent outside, so that it outlives its worker. No torch.

    claimed ──► confirmed ──► each answer, before its last byte is sent ──► rewarded or rejected

A journal is a file in the memory of the node. Each record stands behind its length and checksum, so
one that a death has cut short is cut off. The next life of the worker reads the journal and plays
the calls again, with the answers that were sampled: see `Session.restore`.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from struct import Struct as Packed
from typing import Final

import msgspec
from msgspec import Struct

from areal_sc.engines.base import Completion

logger = logging.getLogger(__name__)

_HEAD: Final = Packed("<II")


class Claimed(Struct, frozen=True, array_like=True, tag=True):
    """Somebody has claimed the episode. `key`: the Idempotency-Key; "": none."""

    key: str


class Confirmed(Struct, frozen=True, array_like=True, tag=True):
    """Whoever has claimed it knows of it."""


class WrittenAnswer(Struct, frozen=True, array_like=True, tag=True):
    """The model has answered a call.

    Attributes:
        number, same, digest, attempt, answer_id, created_s: of the `SessionCall`.
        after: id of the answer that it goes on from; "": it begins a conversation.
        goes_on_row: the call has only the messages behind that answer, and no tools, since they are
            those of the call before.
        call: a `ModelCall` as JSON, whose messages are all that the model was given.
        counts: of the session, with this call.
    """

    number: int
    same: str
    digest: str
    attempt: int
    answer_id: str
    created_s: int
    after: str
    goes_on_row: bool
    call: bytes
    completion: Completion
    counts: dict[str, int]


class EpisodeEnd(Struct, frozen=True, array_like=True, tag=True):
    """The agent has rewarded the episode, or, where `reward` is None, rejected it."""

    reward: float | dict[str, float] | None
    reason: str = ""


Record = Claimed | Confirmed | WrittenAnswer | EpisodeEnd


class SessionJournal:
    """The journal of one session. May be ended on another thread than it is written on.

    Args:
        path: of its file, whose name is the id of the episode.
        forget: is called at the end.

    Attributes:
        found: what an earlier life has written, as far as it is whole.
    """

    def __init__(self, path: Path, forget: Callable[[], None] = lambda: None) -> None:
        self.path = path
        self.found: list[Record] = []
        self._forget = forget
        self._has_ended = False

    def begin(self) -> None:
        """Makes the file. Raises: OSError: there is no room, say."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        self.path.touch(0o600)

    def read(self) -> None:
        """Reads what is there, and cuts off what a death has cut short.

        Raises: OSError: there is no file. msgspec.MsgspecError: it is of another version.
        """
        content, place = self.path.read_bytes(), 0
        while len(content) - place >= _HEAD.size:
            size, checksum = _HEAD.unpack_from(content, place)
            body = content[place + _HEAD.size : place + _HEAD.size + size]
            if len(body) < size or zlib.crc32(body) != checksum:
                break
            self.found.append(msgspec.msgpack.decode(body, type=Record))
            place += _HEAD.size + size
        os.truncate(self.path, place)

    def add(self, record: Record) -> None:
        """Writes a record down. Where that fails, the journal ends: it must not have a gap."""
        body = msgspec.msgpack.encode(record)
        content = _HEAD.pack(len(body), zlib.crc32(body)) + body
        try:
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            try:
                if os.write(file, content) < len(content):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
        except OSError as error:
            if not self._has_ended:
                logger.warning("session %s would not outlive its worker: %s", self.path.name, error)
                self.end()

    def end(self) -> None:
        """The session needs no journal any more."""
        self._has_ended = True
        self.path.unlink(missing_ok=True)
        self._forget()
