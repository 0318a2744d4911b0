"""What a process is doing: its spans that have begun and not ended, in a file of its own.

    rollout-0.open.000003     of the third life that had any

The file is replaced about once a second, and deleted when nothing goes on. So one that is there
says what a process does now, or did when it was killed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from areal_sc.records.record_files import process_of
from areal_sc.records.spans import RecordedSpan, pack_spans, spans_of, unpack_spans

MAX_LIVES: Final = 8
"""Files of lives that were killed; older ones go."""
_NAME: Final = re.compile(r"([a-z][a-z0-9_-]*)\.open\.(\d{6,})")
_MODE: Final = 0o600


@dataclass(frozen=True, order=True)
class OpenFile:
    """A file of spans that had not ended.

    Attributes:
        number: of the life, from 1.
    """

    process: str
    number: int
    path: Path

    def read(self) -> list[RecordedSpan]:
        """Its spans; `took_s` of them reaches to when the process was last heard.

        Raises: OSError: it cannot be read, or has gone. ValueError: it holds something else.
        """
        with self.path.open("rb") as file:
            seen, content = os.fstat(file.fileno()).st_mtime, file.read()
        found = spans_of(unpack_spans(content), self.process)
        return [replace(span, took_s=max(0.0, seen - span.began)) for span in found]


def open_files(folder: Path) -> list[OpenFile]:
    """All of them, by process and number; none where there is no folder.

    Raises: OSError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted(OpenFile(process_of(m[1]), int(m[2]), folder / m[0]) for m in matches)


class OpenSpans:
    """Keeps the file of one life of a process."""

    def __init__(self, folder: Path, process: str) -> None:
        self._folder = folder
        self._process = process
        self._path: Path | None = None
        self._is_there = False

    def write(self, spans: Sequence[RecordedSpan]) -> None:
        """These go on now. Raises: OSError: the file cannot be written."""
        if spans:
            path = self._path = self._path or self._begin()
            partial = path.with_name(f".{path.name}.partial")
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            with open(os.open(partial, flags, _MODE), "wb", buffering=0) as file:
                file.write(pack_spans(spans))
            partial.replace(path)
            self._is_there = True
        elif self._is_there and self._path is not None:
            self._path.unlink(missing_ok=True)
            self._is_there = False

    def _begin(self) -> Path:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        own = [it for it in open_files(self._folder) if it.process == self._process]
        for old in own[: -MAX_LIVES + 1]:
            old.path.unlink(missing_ok=True)
        number = 1 + max((it.number for it in own), default=0)
        name = f"{self._process.replace('/', '-')}.open"
        for unfinished in self._folder.glob(f".{name}.*.partial"):  # by a life that was killed
            unfinished.unlink(missing_ok=True)
        return self._folder / f"{name}.{number:06d}"
