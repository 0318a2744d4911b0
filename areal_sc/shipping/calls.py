"""What nodes ask of the process beside the script that has its files.

A node names a file of the run folder by its path below it, and any other one by the path that it
has on the script's machine, and its name below that. Neither is opened unchecked: see `names`.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import NoneType
from typing import Annotated, Final

from msgspec import Meta

from areal_sc.records.record_files import Series
from areal_sc.transport.rpc.method import Method
from areal_sc.transport.security.passes import WORKERS, Caller

PIECE_BYTES: Final = 960 << 10
"""Most bytes of a file in one message: larger messages are counted before they are read."""
PIECE_LIMIT_S: Final = 60.0
"""For one message: a disk, or a network, that takes longer does not work."""
LISTING_LIMIT_S: Final = 1800.0
"""All files of a model are read once, for their hashes."""


@dataclass(frozen=True)
class FileFact:
    """A file below a path.

    Attributes:
        name: relative, with `/`.
        sha256: hexadecimal; "": of a file of the run folder, which has checksums of its own.
    """

    name: str
    num_bytes: int
    sha256: str = ""


@dataclass(frozen=True)
class Listing:
    """What there is under a path of the script's machine.

    Attributes:
        is_file: the path is that of the only file, whose name is its last part.
        is_missing: there is nothing, or the script has not named the path.
    """

    files: list[FileFact]
    is_file: bool = False
    is_missing: bool = False


@dataclass(frozen=True)
class FilePiece:
    """A part of a file.

    Attributes:
        path: on the script's machine, absolute; "": the run folder.
        name: below the path.
        offset, num_bytes: of the part; at the end of the file there is less.
    """

    path: str
    name: str
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class WrittenPiece:
    """A part of a file that comes back to the run folder; the first one is empty.

    Attributes:
        name: below the run folder.
        token: of this attempt to write the file.
    """

    name: str
    token: str
    offset: int
    content: bytes


@dataclass(frozen=True)
class WrittenFile:
    """A file all pieces of which have come; it gets its name if it is what was sent."""

    name: str
    token: str
    num_bytes: int


@dataclass(frozen=True)
class SentRecords:
    """A part of what a worker records; its files are named after the worker that sends it.

    Attributes:
        number: counts the parts of a worker's life from 1; of one that comes again the first is
            taken. 0: there is nothing in it.
        content: of a block.
        block_bytes: of the whole block that begins with it; 0: it goes on with one.
        max_bytes: of the worker's files.
    """

    number: int
    series: Series
    content: bytes
    block_bytes: int
    max_bytes: Annotated[int, Meta(ge=1)]


LIST_PATH: Final = Method("list_path", str, Listing, callers=WORKERS)
"""A path that the script has named: `named_paths`."""
LIST_RUN: Final = Method("list_run", str, Listing, callers=WORKERS)
"""A folder below the run folder."""
READ_PIECE: Final = Method("read_piece", FilePiece, bytes, callers=WORKERS)
WRITE_PIECE: Final = Method("write_piece", WrittenPiece, NoneType, callers=WORKERS)
"""Of a log; snapshots and models are a trainer's."""
END_FILE: Final = Method("end_file", WrittenFile, NoneType, callers=WORKERS)
SEND_RECORDS: Final = Method(
    "send_records", SentRecords, NoneType, callers=frozenset((Caller.rollout, Caller.train))
)
