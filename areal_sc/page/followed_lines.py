"""A file of JSON lines that is followed while it grows, in whatever state it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from areal_sc.system.json_lines import UNDECODABLE

T = TypeVar("T")

_BLOCK_BYTES: Final = 8 << 20
_HEAD_BYTES: Final = 256
"""The beginning of a file that tells it from another one which took its place."""
_MAX_TOLD: Final = 5
"""Lines that cannot be read, of which the cause is kept."""


class FollowedLines(Generic[T]):
    """Reads what is new in a file, and remembers what of it cannot be read.

    Args:
        decode: makes of a line's bytes what it holds. May raise MsgspecError, UnicodeDecodeError,
            KeyError, TypeError or ValueError: the line is left out.

    Attributes:
        num_begun: how often the reading began at the first line: the file may be replaced.
        num_bytes: of the whole lines that were read.
    """

    def __init__(self, path: Path, decode: Callable[[bytes], T]) -> None:
        self.path = path
        self.num_begun = 0
        self.num_bytes = 0
        self._decode = decode
        self._begin_again()

    def _begin_again(self) -> None:
        self.num_begun += 1
        self.num_bytes = 0
        self._head = b""
        self._num_lines = 0
        self._num_bad = 0
        self._told: list[str] = []
        self._cut = ""
        self._failure = ""

    @property
    def damage(self) -> list[str]:
        """What cannot be read, in sentences."""
        told = [*self._told]
        if self._num_bad > len(self._told):
            told.append(f"{self.path.name}: {self._num_bad - len(self._told)} more such lines")
        return [text for text in (*told, self._cut, self._failure) if text]

    def read_new(self) -> Iterator[T]:
        """What each new whole line holds.

        `num_begun` is to be compared before the first of them is used.
        """
        self._failure = ""
        try:
            with self.path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(len(self._head))
                if size < self.num_bytes or head != self._head:
                    self._begin_again()
                yield from self._lines(file.fileno(), size)
        except FileNotFoundError:
            if self.num_bytes:
                self._begin_again()
        except OSError as error:
            self._failure = f"{self.path.name} cannot be read: {error.strerror}"

    def _lines(self, file: int, size: int) -> Iterator[T]:
        rest = b""
        at = self.num_bytes
        while at < size:
            block = os.pread(file, min(_BLOCK_BYTES, size - at), at)
            if not block:
                break
            if not self._head:
                self._head = block[:_HEAD_BYTES]
            at += len(block)
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self.num_bytes += len(line) + 1
                self._num_lines += 1
                yield from self._held(line)
        num_cut = len(rest)
        self._cut = (
            f"{self.path.name}: the last {num_cut} bytes are left out: a line is being written, "
            "or was cut short"
            if num_cut
            else ""
        )

    def _held(self, line: bytes) -> Iterator[T]:
        """What a line holds; nothing of one that cannot be read."""
        try:
            yield self._decode(line)
            return
        except (*UNDECODABLE, KeyError, TypeError, ValueError) as error:
            cause: Exception = error
        try:
            whole = self._decode(line.decode(errors="replace").encode())
        except (*UNDECODABLE, KeyError, TypeError, ValueError):
            self.note_bad(f"is left out: {cause}")
        else:
            self.note_bad("is no valid UTF-8: \N{REPLACEMENT CHARACTER} stands for what is not")
            yield whole

    def note_bad(self, text: str) -> None:
        """The line that was read last is bad, in words that follow its number."""
        self._num_bad += 1
        if len(self._told) < _MAX_TOLD:
            self._told.append(f"{self.path.name}, line {self._num_lines} {text}")
