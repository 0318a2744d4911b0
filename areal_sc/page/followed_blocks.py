"""Files of records that are followed while they grow, in whatever state they are."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from areal_sc.page.stamps import Stamp, stamp_of
from areal_sc.records.blocks import Gap, RecordBlock, read_blocks
from areal_sc.records.record_files import RecordFile, Series, record_files

_MAX_TOLD: Final = 5


class FollowedBlocks:
    """Reads what is new in the files of some series.

    Args:
        folder: `records/` of a run; an old run has none.
    """

    def __init__(self, folder: Path, series: Collection[Series]) -> None:
        self._folder = folder
        self._series = series
        self._read_bytes: dict[Path, int] = {}
        self._files: list[RecordFile] = []
        self._whole: set[Path] = set()
        self._told: list[str] = []
        self._num_bad = 0
        self._unfinished: dict[str, int] = {}
        self._failure = ""

    def stamp(self) -> Stamp:
        """It changes when a file does that is written to."""
        try:
            files = record_files(self._folder)
        except OSError:  # as if there were none
            return []
        return stamp_of(*(it.path for it in _newest(files) if it.series in self._series))

    @property
    def damage(self) -> list[str]:
        """What cannot be read, and what is gone, in sentences."""
        told = [*self._told]
        if self._num_bad > len(told):
            told.append(f"records: {self._num_bad - len(told)} more such places")
        for name, num_bytes in self._unfinished.items():
            if num_bytes:
                told.append(
                    f"{name}: the last {num_bytes} bytes are left out: a record is being written, "
                    "or was cut short"
                )
        if num_gone := self._num_gone():
            told.append(
                f"records: the oldest {num_gone} files are gone, as records.max_bytes wants it"
            )
        return [*told, self._failure] if self._failure else told

    def note_bad(self, file: RecordFile, why: str) -> None:
        """A place in a file is bad."""
        self._num_bad += 1
        if len(self._told) < _MAX_TOLD:
            self._told.append(f"{file.path.name}: {why}")

    def read_new(self) -> Iterator[tuple[RecordFile, int, RecordBlock]]:
        """Each new whole block, with its file and the descriptor by which that is open now."""
        self._failure = ""
        try:
            self._files = [it for it in record_files(self._folder) if it.series in self._series]
            newest = set(_newest(self._files))
            for file in self._files:
                if file.path in self._whole:
                    continue
                yield from self._of_file(file)
                if file not in newest:  # its process writes to another one
                    self._whole.add(file.path)
        except OSError as error:
            name = Path(error.filename or self._folder).name
            self._failure = f"records: {name} cannot be read: {error.strerror}"

    def _of_file(self, file: RecordFile) -> Iterator[tuple[RecordFile, int, RecordBlock]]:
        begin = self._read_bytes.get(file.path, 0)
        try:
            with file.path.open("rb") as opened:
                descriptor = opened.fileno()
                size = os.fstat(descriptor).st_size
                if size <= begin:
                    return
                for found in read_blocks(descriptor, begin, size):
                    self._read_bytes[file.path] = found.end
                    if isinstance(found, Gap):
                        num_bytes = found.end - found.begin
                        self.note_bad(file, f"{num_bytes} bytes at {found.begin} are damaged")
                    else:
                        yield file, descriptor, found
                self._unfinished[file.path.name] = size - self._read_bytes.get(file.path, 0)
        except FileNotFoundError:  # it has just gone
            return

    def _num_gone(self) -> int:
        """Files that there were before the first one of their process and series."""
        first: dict[tuple[str, Series], int] = {}
        for file in self._files:
            first.setdefault((file.process, file.series), file.number)
        return sum(number - 1 for number in first.values())


def _newest(files: Iterable[RecordFile]) -> Iterable[RecordFile]:
    """The last file of each process and series.

    Args:
        files: by process, series and number.
    """
    return {(it.process, it.series): it for it in files}.values()
