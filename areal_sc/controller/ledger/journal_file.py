"""A segment of the ledger's journal, as it lies in a file.

    areal_sc-ledger 1\\n                   a line: kind, and format version
    length | check | checksum | record    the first: `LedgerState`, all that was before
    length | check | checksum | record    each further one: a change of it, in order

`length` is that of the record in bytes, `check` the CRC-32 of the length, `checksum` that of the
record; each takes 4 bytes, little-endian. Since the length is checked by itself, a record that was
cut short at the end of a file is told from one that is damaged.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import msgspec

from areal_sc.controller.ledger.ledger_records import LedgerState, Record, Trained
from areal_sc.errors import JournalDamaged, RunFolderError

FORMAT_VERSION = 1

_KIND = b"areal_sc-ledger"
HEADER = b"%s %d\n" % (_KIND, FORMAT_VERSION)

_FRAME = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_RECORDS = msgspec.msgpack.Decoder(Record)
_STATE = msgspec.msgpack.Decoder(LedgerState)


@dataclass(frozen=True)
class Segment:
    """What a segment holds.

    Attributes:
        num_bytes: of all that is whole; what follows was cut short when its writer ended.
    """

    state: LedgerState
    records: list[Record]
    num_bytes: int


def to_frame(record: Record | LedgerState) -> bytes:
    """The record as it lies in a file."""
    packed = msgspec.msgpack.encode(record)
    length = len(packed)
    return _FRAME.pack(length, crc32(_LENGTH.pack(length)), crc32(packed)) + packed


def read_segment(content: bytes, path: Path) -> Segment:
    """What a file holds; a last record that was cut short is left out.

    So is a `Trained` at the end: its `Publish`, which is written with it, was cut off. The step is
    not announced yet, and both are written when it is.

    Raises: RunFolderError: it is of another format version, or damaged; names `path`.
    """
    line, newline, _ = content.partition(b"\n")
    kind, _, version = line.partition(b" ")
    if not newline or kind != _KIND:
        raise _damaged(path, 0, "expected the journal of a ledger")
    if version != b"%d" % FORMAT_VERSION:
        raise RunFolderError(
            f"{path}: expected format_version {FORMAT_VERSION}, got {version.decode('latin-1')}: "
            "another version of areal_sc wrote it; go on with that one, or choose another run_dir"
        )
    packed, num_bytes = _frames(content, path, len(HEADER))
    if not packed:
        raise _damaged(path, len(HEADER), "expected the state of a ledger")
    try:
        state, records = _STATE.decode(packed[0]), [_RECORDS.decode(p) for p in packed[1:]]
        if records and isinstance(records[-1], Trained):
            records.pop()
            num_bytes -= _FRAME.size + len(packed[-1])
        return Segment(state, records, num_bytes)
    except msgspec.MsgspecError as error:
        raise RunFolderError(f"{path}: it holds a record that is none: {error}") from error


def _frames(content: bytes, path: Path, at: int) -> tuple[list[memoryview], int]:
    """The whole records from a place on, and where the last of them ends."""
    view, packed = memoryview(content), []
    while at + _FRAME.size <= len(content):
        length, check, checksum = _FRAME.unpack_from(content, at)
        if crc32(_LENGTH.pack(length)) != check:
            raise _damaged(path, at, "the length of a record has another checksum")
        first = at + _FRAME.size
        if first + length > len(content):
            break
        record = view[first : first + length]
        if crc32(record) != checksum:
            raise _damaged(path, at, "a record has another checksum")
        packed.append(record)
        at = first + length
    return packed, at


def _damaged(path: Path, at: int, found: str) -> JournalDamaged:
    error = JournalDamaged(
        f"{path} is damaged at byte {at}: {found}. Nothing goes on from it. Move the folder "
        f"{path.parent} away to start from the newest snapshot, with an account that begins there"
    )
    error.path, error.at = path, at
    return error
