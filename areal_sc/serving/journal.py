"""What clients have asked for and were answered, in a file of the run folder.

    request ──► its line, then its work ──► the answer's line, then the client gets it

A server that was killed reads it when it starts again: answered requests are answered again, and
the others are worked on, in the order in which they came. The file begins anew with each model.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from areal_sc.system.durable import append_or_undo, own_file

logger = logging.getLogger(__name__)

_HEAD_BYTES: Final = 8  # length and checksum of what follows


class KeptRequest(Struct, frozen=True, array_like=True, tag=True):
    """A request: what serves it, and its body."""

    name: str
    body: bytes


class WrittenReply(Struct, frozen=True, array_like=True, tag=True):
    """The answer of a request, by its id."""

    request_id: str
    body: bytes
    content_type: str
    is_failure: bool


Record = KeptRequest | WrittenReply

_DECODER: Final = msgspec.msgpack.Decoder(Record)


class ServeJournal:
    """The file; what is written is there when the process dies, not when the machine does.

    Raises: OSError: it cannot be read or written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open(path, "ab", buffering=0, opener=own_file)  # noqa: SIM115

    def records(self) -> list[Record]:
        """All that are whole; what a death has cut short is cut off."""
        content = self._path.read_bytes()
        found = list(_whole(content))
        end = found[-1][1] if found else 0
        if end < len(content):
            logger.warning("%s: %d bytes at the end are cut off", self._path, len(content) - end)
            self._file.truncate(end)
        return [record for record, _ in found]

    def begin_anew(self, first: Record) -> None:
        """Nothing that came before counts any more."""
        self._file.truncate(0)
        self.write(first)

    def write(self, record: Record) -> None:
        content = msgspec.msgpack.encode(record)
        head = len(content).to_bytes(4) + zlib.crc32(content).to_bytes(4)
        append_or_undo(self._file, head + content)

    def close(self) -> None:
        self._file.close()


def _whole(content: bytes) -> Iterator[tuple[Record, int]]:
    """Each record, and where it ends."""
    start = 0
    while start + _HEAD_BYTES <= len(content):
        length = int.from_bytes(content[start : start + 4])
        checksum = int.from_bytes(content[start + 4 : start + _HEAD_BYTES])
        start += _HEAD_BYTES
        body = content[start : start + length]
        if len(body) < length or zlib.crc32(body) != checksum:
            return
        start += length
        yield _DECODER.decode(body), start
