"""A file of records as blocks, each found again behind damage by its marker and its checksums.

    block   marker (8 bytes), sizes of head and body, CRC-32 of sizes and head, CRC-32 of the body
            (uint32 each, little-endian), head, body

Whoever wants few of many records reads the heads. A writer that was killed leaves an unfinished
block at the end, which is left out.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

MARKER: Final = b"\xa5AREC\r\n\x1a"
_LAYOUT: Final = Struct("<8sIIII")
_SIZES: Final = Struct("<II")
_SEARCHED_BYTES: Final = 1 << 20


class RecordBlock(NamedTuple):
    """A block whose head is as it was written.

    Attributes:
        begin, end: where it begins, and the next one.
        body_at, num_bytes, checksum: of the body, which `read_body` reads.
    """

    head: bytes
    end: int
    body_at: int
    num_bytes: int
    checksum: int

    @property
    def begin(self) -> int:
        return self.body_at - len(self.head) - _LAYOUT.size


class Gap(NamedTuple):
    """Bytes from `begin` to `end` that are no block."""

    begin: int
    end: int


def block(head: bytes, body: bytes) -> bytes:
    """A block, as it is appended to a file."""
    sizes = _SIZES.pack(len(head), len(body))
    checksum = crc32(head, crc32(sizes))
    return _LAYOUT.pack(MARKER, len(head), len(body), checksum, crc32(body)) + head + body


def read_blocks(file: int, begin: int, size: int) -> Iterator[RecordBlock | Gap]:
    """The whole blocks of a file, and what is damaged between them.

    Args:
        file: a descriptor.
        begin: a byte where a block begins.
        size: of the file. What follows the last whole block may be in the middle of being written.
    Raises: OSError: the file cannot be read.
    """
    at = begin
    while at < size:
        found = _block_at(file, at, size)
        if found is not None:
            yield found
            at = found.end
            continue
        following = _marker_behind(file, at, size)
        if following is None:
            return
        yield Gap(at, following)
        at = following


def read_block(path: Path, begin: int, end: int) -> tuple[bytes, bytes]:
    """Head and body of the record in these bytes of a file.

    Raises: OSError: it cannot be read. ValueError: there is none.
    """
    with path.open("rb") as file:
        found = next(read_blocks(file.fileno(), begin, end), None)
        if not isinstance(found, RecordBlock):
            raise ValueError(f"the record at byte {begin} is damaged")
        return found.head, read_body(file.fileno(), found)


def read_body(file: int, found: RecordBlock) -> bytes:
    """The body of a block.

    Raises: ValueError: it is not what was written. OSError: the file cannot be read.
    """
    body = os.pread(file, found.num_bytes, found.body_at)
    if crc32(body) != found.checksum:
        raise ValueError(f"{found.num_bytes} bytes at byte {found.body_at} have a wrong checksum")
    return body


def _block_at(file: int, at: int, size: int) -> RecordBlock | None:
    """None: it is damaged, or not all of it is there."""
    layout = os.pread(file, _LAYOUT.size, at)
    if len(layout) < _LAYOUT.size:
        return None
    marker, head_bytes, body_bytes, checksum, of_body = _LAYOUT.unpack(layout)
    body_at = at + _LAYOUT.size + head_bytes
    if marker != MARKER or body_at + body_bytes > size:
        return None
    head = os.pread(file, head_bytes, at + _LAYOUT.size)
    if crc32(head, crc32(_SIZES.pack(head_bytes, body_bytes))) != checksum:
        return None
    return RecordBlock(head, body_at + body_bytes, body_at, body_bytes, of_body)


def _marker_behind(file: int, at: int, size: int) -> int | None:
    """Where the next marker stands, behind the byte `at`."""
    at += 1
    while at < size:
        part = os.pread(file, _SEARCHED_BYTES + len(MARKER), at)
        if (place := part.find(MARKER)) >= 0:
            return at + place
        at += _SEARCHED_BYTES
    return None
