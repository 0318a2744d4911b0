"""The files in `records/` of a run folder: each has one writer, grows at its end, and has a limit.

    rollout-0.rows.000007     groups, the 7th file of them that `rollout/0` has begun
    rollout-0.kept.000001     remarkable groups
    rollout-0.evaluated.000001   answers of evaluations: they go last
    rollout-0.spans.000002    what it did, and how long
    rollout-0.pictures.000001    the pictures of groups and answers, which name them
    train-0.trained.000001    what a train rank computed of the tokens of some rows

Each life of a worker begins files of its own. When the files of a worker take more than they may,
the oldest `pictures` go, then the oldest `rows`, then the oldest `spans`, then the oldest of what
is `kept`, then the answers of evaluations, none of them when it takes less than its share. The
newest file of a series stays, so that no number comes again.
"""

from __future__ import annotations

import os
import re
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from areal_sc.system.durable import append_or_undo

_NUM_FILES: Final = 20
"""A file takes this part of the limit, so that what goes is little."""
_MAX_FILE_BYTES: Final = 64 << 20
_NAME: Final = re.compile(
    r"([a-z][a-z0-9_-]*)\.(pictures|rows|kept|spans|trained|evaluated)\.(\d{6,})"
)
_MODE: Final = 0o600


class Series(StrEnum):
    """What is in a file, in the order in which files go."""

    pictures = "pictures"
    rows = "rows"
    spans = "spans"
    trained = "trained"
    kept = "kept"
    evaluated = "evaluated"


_MOST_SERIES: Final = 5
"""A process writes so many of them at most: what is trained, ranks alone."""
_SHARE: Final = 3
"""Parts of the limit that each series has, whatever the others take; the rest is for new files."""


class RecordFile(NamedTuple):
    """A file of records.

    Attributes:
        number: from 1, among those of its process and series; missing ones are gone.
    """

    process: str
    series: Series
    number: int
    path: Path


def record_files(folder: Path) -> list[RecordFile]:
    """All of them, by process, series and number; none where there is no folder.

    Raises: OSError: the folder cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [match for match in map(_NAME.fullmatch, names) if match]
    return sorted(
        RecordFile(process_of(m[1]), Series(m[2]), int(m[3]), folder / m[0]) for m in matches
    )


def process_of(name: str) -> str:
    """The process that a file is named after."""
    role, dash, index = name.rpartition("-")
    return f"{role}/{index}" if dash else name


class RecordStore(Protocol):
    """Takes what one life of a process records; one thread calls it.

    Attributes:
        max_bytes: of all files of the process together, about.
    """

    max_bytes: int

    def append(self, series: Series, content: bytes) -> None:
        """Adds a block. Raises: OSError, ArealError: it cannot be kept."""

    def close(self) -> None:
        """Nothing more comes."""


class FilesOfProcess:
    """The files of one life of a process. A `RecordStore`."""

    def __init__(self, folder: Path, process: str, max_bytes: int) -> None:
        self._folder = folder
        self._process = process
        self._name = process.replace("/", "-")
        self.max_bytes = max_bytes
        self._file_bytes = min(max_bytes // _NUM_FILES, _MAX_FILE_BYTES)
        self._open: dict[Series, int] = {}  # descriptors
        self._sizes: dict[Series, int] = {}

    def append(self, series: Series, content: bytes, num_bytes: int | None = None) -> None:
        """Appends a block; a file that it would make too large is followed by another one.

        Args:
            num_bytes: of the whole block, if `content` is its beginning; 0: it goes on with one.
        Raises: OSError: it cannot be written; nothing of it is there.
        """
        size = self._sizes.get(series, 0)
        end = size + (len(content) if num_bytes is None else num_bytes)
        if series not in self._open or (size and end > max(size, self._file_bytes)):
            self._begin_file(series)
            size = 0
        with open(self._open[series], "ab", buffering=0, closefd=False) as file:
            append_or_undo(file, content)
        self._sizes[series] = size + len(content)

    def ends_with(self, series: Series, content: bytes) -> bool:
        """Whether this is the end of the newest file of a series. Raises: OSError."""
        for newest in [it for it in self._own_files() if it.series is series][-1:]:
            with open(newest.path, "rb") as file:
                file.seek(-min(len(content), newest.path.stat().st_size), os.SEEK_END)
                return file.read() == content
        return False

    def close(self) -> None:
        for file in self._open.values():
            os.close(file)
        self._open.clear()

    def _own_files(self) -> list[RecordFile]:
        self._folder.mkdir(exist_ok=True, mode=0o700)
        return [it for it in record_files(self._folder) if it.process == self._process]

    def _begin_file(self, series: Series) -> None:
        if series in self._open:
            os.close(self._open.pop(series))
        own = self._own_files()
        self._make_room(own)
        number = max((it.number for it in own if it.series is series), default=0)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        while True:
            number += 1
            name = f"{self._name}.{series}.{number:06d}"
            try:
                file = os.open(self._folder / name, flags, _MODE)
            except FileExistsError:  # of a life of the worker that was taken for dead
                continue
            self._open[series] = file
            return

    def _make_room(self, own: list[RecordFile]) -> None:
        """The first files go, in the order of `Series`, until a file more of each has room."""
        sizes = {it: _size_of(it.path) for it in own}
        excess = sum(sizes.values()) + _MOST_SERIES * self._file_bytes - self.max_bytes
        for series in Series:
            of_series = [it for it in own if it.series is series]
            beyond = sum(sizes[it] for it in of_series) - _SHARE * self.max_bytes // _NUM_FILES
            for it in of_series[:-1]:
                if min(excess, beyond) <= 0:
                    break
                it.path.unlink(missing_ok=True)
                excess -= sizes[it]
                beyond -= sizes[it]


def newest_bytes(max_bytes: int) -> int:
    """What stays of the newest blocks of a series, however much each of the others takes."""
    return max_bytes // _NUM_FILES


def _size_of(path: Path) -> int:
    """0 of a file that another life of the worker has just deleted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
