"""What clients have asked for, were answered, and what the ranks were asked for then.

    request ──► its record, then its work ──► the answer's record, then the client gets it
                        │
                        └─► the record of a turn of the ranks, then the turn: see `rank_turns`

A server that was killed reads it when it starts again: answered requests are answered again, and
the others are worked on, in the order in which they came. A file that has grown large is written
anew, by what its models have come to.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from areal_sc.errors import RunFolderError
from areal_sc.system.durable import append_or_undo, os_errors_as, own_file, replace_file

logger = logging.getLogger(__name__)

JSON: Final = "application/json"
_HEAD_BYTES: Final = 8  # length and checksum of what follows


class KeptRequest(Struct, frozen=True, array_like=True, tag=True):
    """A request: what serves it, its body, and the name of the key that it came with.

    Attributes:
        request_id: of its answer; "": it is answered at once.
    """

    name: str
    body: bytes
    tenant: str
    request_id: str


class ApiAnswer(Struct, frozen=True, array_like=True, tag="WrittenReply"):
    """What a client gets for a request, as it goes over the wire.

    Attributes:
        request_id: whose answer it is, or of one that only says that the work goes on, whose it
            will be; "": nobody asks for it again.
    """

    request_id: str
    body: bytes
    content_type: str = JSON
    is_failure: bool = False


class Source(Struct, frozen=True, array_like=True):
    """What a model begins with where it gets a place.

    Attributes:
        folder: of an adapter; "": it is new.
        has_optimizer: the optimizer's state of that folder counts, too.
        seed, rank: of a new adapter.
    """

    folder: str = ""
    has_optimizer: bool = False
    seed: int = 0
    rank: int = 0


class Entered(Struct, frozen=True, array_like=True, tag=True):
    """A model gets a place among those that are trained, or other weights there.

    Attributes:
        version: of the ranks before it, as in the other turns.
        number: of the turn, from 0 on, which names what the ranks do.
        request_id: of the client that asks for other weights; "": it came to the model's turn.
    """

    version: int
    number: int
    model_id: str
    place: int
    source: Source
    request_id: str = ""


class Left(Struct, frozen=True, array_like=True, tag=True):
    """A model leaves its place to another one; what it has come to is in a folder."""

    version: int
    number: int
    model_id: str
    folder: str


class Stepped(Struct, frozen=True, array_like=True, tag=True):
    """One update of the models that these requests are of."""

    version: int
    number: int
    request_ids: tuple[str, ...]


class Published(Struct, frozen=True, array_like=True, tag=True):
    """The weights of the one model that there is are published."""

    version: int
    number: int
    request_id: str


class Failed(Struct, frozen=True, array_like=True, tag=True):
    """The turn of this number has failed, and changed nothing."""

    number: int


class KnownModel(Struct, frozen=True, array_like=True):
    """What a `TrainedModel` has come to; see there.

    Attributes:
        next_number: of its requests.
    """

    model_id: str
    tenant: str
    source: Source
    place: int | None
    num_rows: int
    asked: list[int]
    num_asked_tokens: int
    next_number: int
    saved: list[str]
    samplers: list[str]


class Known(Struct, frozen=True, array_like=True, tag=True):
    """What all that came before has come to, in place of it; the first record of a file.

    Attributes:
        version: of the ranks, whose weights are those of the models' sources; they were asked for
            no change since they came to it.
        rows: name of the file of rows.
        samplers: folders of adapters, by the id of the session or the path.
    """

    version: int
    rows: str
    models: list[KnownModel]
    samplers: dict[str, str]


Turn = Entered | Left | Stepped | Published
Record = Known | KeptRequest | ApiAnswer | Turn | Failed

_DECODER: Final = msgspec.msgpack.Decoder(Record)


class ServeJournal:
    """The file; what is written is there when the process dies, not when the machine does.

    Raises: OSError: it cannot be opened, or read.

    Attributes:
        size: bytes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open()

    def _open(self) -> None:
        self._file = open(self._path, "ab", buffering=0, opener=own_file)  # noqa: SIM115
        self.size = self._file.seek(0, os.SEEK_END)

    def records(self) -> list[Record]:
        """All that are whole; what a death has cut short is cut off."""
        content = self._path.read_bytes()
        found = list(_whole(content))
        end = found[-1][1] if found else 0
        if end < len(content):
            logger.warning("%s: %d bytes at the end are cut off", self._path, len(content) - end)
            self._file.truncate(end)
        return [record for record, _ in found]

    def begin_anew(self, records: Iterable[Record]) -> None:
        """Nothing else counts any more; a death leaves the one or the other.

        Raises: RunFolderError: it cannot be written.
        """
        cannot = os_errors_as(RunFolderError, f"cannot write {self._path}")
        with cannot, replace_file(self._path, mode=0o600) as file:
            for record in records:
                file.write(_framed(record))
        self._file.close()
        self._open()

    def write(self, record: Record) -> None:
        """Raises: RunFolderError: it cannot be written."""
        content = _framed(record)
        with os_errors_as(RunFolderError, f"cannot write {self._path}"):
            append_or_undo(self._file, content)
        self.size += len(content)

    def close(self) -> None:
        self._file.close()


def _framed(record: Record) -> bytes:
    content = msgspec.msgpack.encode(record)
    return len(content).to_bytes(4) + zlib.crc32(content).to_bytes(4) + content


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
