"""What is written down of a session of an agent outside, so that it outlives its worker. No torch.

    claimed ──► confirmed ──► each answer, before its last byte is sent ──► rewarded or rejected

A journal is a file in the memory of the node. Each record is a line of JSON behind its checksum, so
one that a death has cut short is cut off. A picture is written once, before the first answer to it.
The next life of the worker reads the journal and plays the calls again, with the answers that were
sampled: see `Session.restore`.
"""

from __future__ import annotations

import errno
import logging
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from areal_sc.agents.calls import ModelCall
from areal_sc.agents.rows import Rewards
from areal_sc.engines.base import Completion

logger = logging.getLogger(__name__)

MAX_JOURNAL_BYTES: Final = 64 << 20
"""Of one session: more than conversations take, and so little that none fills the node's memory."""
_CHECKSUM_CHARS: Final = 8


class Claimed(Struct, frozen=True, array_like=True, tag=True):
    """Somebody has claimed the episode.

    Attributes:
        key: the Idempotency-Key of the claim; "": none.
        is_confirmed: who has claimed it knows of it.
    """

    key: str
    is_confirmed: bool = False


class WrittenAnswer(Struct, frozen=True, array_like=True, tag=True):
    """The model has answered a call.

    Attributes:
        number, same, digest, answer_id, created_s: of the `SessionCall`.
        after: id of the answer that it goes on from; "": it begins a conversation.
        goes_on_row: the messages are those behind that answer, and the call has no tools, since
            they are those of the call before.
        messages: all that the model was given, as JSON of Python, which has a NaN of arguments.
        call: without messages and metadata.
    """

    number: int
    same: str
    digest: str
    answer_id: str
    created_s: int
    after: str
    goes_on_row: bool
    messages: str
    call: ModelCall
    completion: Completion


class WrittenPicture(Struct, frozen=True, array_like=True, tag=True):
    """A message has a picture that none had before.

    Attributes:
        name: that messages have in its place.
    """

    name: str
    picture: bytes


class EpisodeEnd(Struct, frozen=True, array_like=True, tag=True):
    """The agent has rewarded the episode, or, where `reward` is None, rejected it."""

    reward: Rewards | None
    reason: str = ""


Record = Claimed | WrittenAnswer | WrittenPicture | EpisodeEnd


class SessionJournal:
    """The journal of one session. It may be ended on another thread than it is written on.

    Args:
        make: the empty file for a session of this id; None: nothing is written down.

    Attributes:
        path: of its file, whose name is the id; None: there is none, and `add` does nothing.
    """

    def __init__(
        self, make: Callable[[str], Path | None] = lambda _: None, path: Path | None = None
    ) -> None:
        self.path = path
        self._make = make

    def begin(self, session_id: str) -> None:
        """Begins the journal, unless it has begun."""
        self.path = self.path or self._make(session_id)

    def read(self) -> list[Record]:
        """What is there; what a death has cut short is cut off.

        Raises: OSError: there is no file. msgspec.MsgspecError: it is of another version.
        """
        assert self.path is not None
        found, num_bytes = list[Record](), 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            body = line[_CHECKSUM_CHARS:-1]
            if line != _line_of(body):
                break
            found.append(msgspec.json.decode(body, type=Record))
            num_bytes += len(line)
        os.truncate(self.path, num_bytes)
        return found

    def add(self, record: Record) -> None:
        """Writes a record down. Where that fails, the journal ends: it must not have a gap."""
        if (path := self.path) is None:
            return
        line = _line_of(msgspec.json.encode(record))
        try:
            with path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) + len(line) > MAX_JOURNAL_BYTES:
                    raise OSError(errno.EFBIG, f"expected at most {MAX_JOURNAL_BYTES} bytes")
                file.write(line)
        except OSError as error:
            if self.path:
                logger.warning("session %s would not outlive its worker: %s", path.name, error)
                self.end()

    def end(self) -> None:
        """The session needs no journal any more."""
        path, self.path = self.path, None
        if path:
            path.unlink(missing_ok=True)


def _line_of(body: bytes) -> bytes:
    return b"%08x%b\n" % (zlib.crc32(body), body)
