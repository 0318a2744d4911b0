"""Pictures of recorded rows: each is stored once, in files of its own, and rows name its digest."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Final

import msgspec
from msgspec import Struct

from areal_sc.sources.pictures import looked_at

_KNOWN_BYTES: Final = 4096
"""A picture counts as so many bytes more, so that few small ones are remembered."""


class RecordedPicture(Struct, frozen=True):
    """What is told of a picture.

    Attributes:
        digest: of its content, in hexadecimal.
        kind: one of `sources.pictures.CONTENT_TYPES`.
        width, height: in pixels.
        num_bytes: of its content, compressed as it came.
    """

    digest: str
    kind: str
    width: int
    height: int
    num_bytes: int

    @classmethod
    def of(cls, picture: bytes) -> RecordedPicture:
        """Raises: WorkflowError: it is none."""
        image = looked_at(picture)
        # pillow has another name for a JPEG with more than one picture in it
        kind = "JPEG" if image.format == "MPO" else str(image.format)
        digest = blake2b(picture, digest_size=16).hexdigest()
        return cls(digest, kind, *image.size, len(picture))

    def __str__(self) -> str:
        return f"{self.kind}, {self.width} x {self.height} pixels, {self.num_bytes} bytes"


class KnownPictures:
    """The pictures that the files of a process surely have.

    Args:
        newest_bytes: of the newest pictures, those that are not deleted yet.
    """

    def __init__(self, newest_bytes: int) -> None:
        self._newest_bytes = newest_bytes
        self._num_bytes = 0
        self._ends = OrderedDict[str, int]()

    def is_new(self, picture: RecordedPicture) -> bool:
        """Whether it has to be written; it counts as written from now on."""
        while self._ends and self._num_bytes - next(iter(self._ends.values())) > self._newest_bytes:
            self._ends.popitem(last=False)
        if picture.digest in self._ends:
            return False
        self._num_bytes += picture.num_bytes + _KNOWN_BYTES
        self._ends[picture.digest] = self._num_bytes
        return True


def pack_picture(picture: RecordedPicture) -> bytes:
    """The head of a block whose body is the picture; `unpack_picture` is its inverse."""
    return msgspec.msgpack.encode(picture)


def unpack_picture(head: bytes) -> RecordedPicture:
    """Raises: ValueError: it is no such head."""
    try:
        return msgspec.msgpack.decode(head, type=RecordedPicture)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the head of a picture cannot be read: {error}") from error
