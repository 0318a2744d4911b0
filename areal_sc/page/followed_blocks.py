"""Files of records that are followed while they grow, in whatever state they are."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final

from msgspec import Struct

from areal_sc.page.stamps import Stamp, stamp_of
from areal_sc.records.blocks import Gap, RecordBlock, read_blocks
from areal_sc.records.record_files import RecordFile, Series, record_files
from areal_sc.records.recorder import RANK_BYTES

_MAX_TOLD: Final = 5
_HEAD_BYTES: Final = 256
"""The beginning of a file that tells it from another one which took its place."""


class Progress(Struct):
    """How far files are read, and what in them cannot be.

    Attributes:
        num_bytes: name of a file -> where its next block begins.
        heads: name of a file -> its first bytes, up to that place.
        told: places that cannot be read, the first few of them.
        num_bad: all of these places.
    """

    num_bytes: dict[str, int] = {}
    heads: dict[str, bytes] = {}
    told: list[str] = []
    num_bad: int = 0


class FollowedBlocks:
    """Reads what is new in the files of some series.

    Args:
        folder: `records/` of a run; an old run has none.

    Attributes:
        progress: kept by whoever wants to go on from it later.
    """

    def __init__(self, folder: Path, series: Collection[Series]) -> None:
        self._folder = folder
        self._series = series
        self.progress = Progress()
        self._files: list[RecordFile] = []
        self._whole: set[Path] = set()
        self._unfinished: dict[str, int] = {}
        self._failure = ""

    def stamp(self, *, of_all: bool = False) -> Stamp:
        """It changes when a file does that is written to.

        Args:
            of_all: also of the files that are not written to any more.
        """
        try:
            files = record_files(self._folder)
        except OSError:  # as if there were none
            return []
        files = [it for it in files if it.series in self._series]
        return stamp_of(*(it.path for it in (files if of_all else _newest(files))))

    @property
    def damage(self) -> list[str]:
        """What cannot be read, and what is gone, in sentences."""
        told = [*self.progress.told]
        if self.progress.num_bad > len(told):
            told.append(f"records: {self.progress.num_bad - len(told)} more such places")
        for name, num_bytes in self._unfinished.items():
            if num_bytes:
                told.append(
                    f"{name}: the last {num_bytes} bytes are left out: a record is being written, "
                    "or was cut short"
                )
        if num_gone := self._num_gone():
            told.append(
                f"records: the oldest {num_gone} files are gone: rollout workers keep "
                f"records.max_bytes, each other process {RANK_BYTES >> 20} MiB"
            )
        return [*told, self._failure] if self._failure else told

    def note_bad(self, file: RecordFile, why: str) -> None:
        """A place in a file is bad."""
        self.progress.num_bad += 1
        if len(self.progress.told) < _MAX_TOLD:
            self.progress.told.append(f"{file.path.name}: {why}")

    def go_on_from(self, progress: Progress) -> None:
        """What was read before is what `progress` says."""
        self.progress = progress
        self._whole.clear()

    def forget_gone(self) -> list[str]:
        """Names of files that were read, and are not there any more."""
        known = self.progress.num_bytes
        gone = [name for name in known if not (self._folder / name).exists()]
        for name in gone:
            del known[name]
            self.progress.heads.pop(name, None)
        return gone

    def begins_again(self) -> bool:
        """Whether another run has the folder by now, of which nothing was read."""
        is_another = self._is_another_run()
        if is_another:
            self.go_on_from(Progress())
        return is_another

    def _is_another_run(self) -> bool:
        """Whether a file that was read has given its place to another one."""
        for name, head in self.progress.heads.items():
            try:
                with (self._folder / name).open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if size < self.progress.num_bytes[name] or file.read(len(head)) != head:
                        return True
            except OSError:  # it is gone, or is told when it is read
                continue
        return False

    def num_bytes(self) -> tuple[int, int]:
        """Bytes of whole blocks that are read, and bytes of the files."""
        sizes = {name: size for name, size, _ in self.stamp(of_all=True)}
        read = self.progress.num_bytes
        return sum(min(read.get(name, 0), size) for name, size in sizes.items()), sum(
            sizes.values()
        )

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
        name, progress = file.path.name, self.progress
        begin = progress.num_bytes.get(name, 0)
        try:
            with file.path.open("rb") as opened:
                descriptor = opened.fileno()
                size = os.fstat(descriptor).st_size
                if size <= begin:
                    return
                for found in read_blocks(descriptor, begin, size):
                    progress.num_bytes[name] = found.end
                    if name not in progress.heads:
                        length = min(_HEAD_BYTES, found.end)
                        progress.heads[name] = os.pread(descriptor, length, 0)
                    if isinstance(found, Gap):
                        num_bytes = found.end - found.begin
                        self.note_bad(file, f"{num_bytes} bytes at {found.begin} are damaged")
                    else:
                        yield file, descriptor, found
                self._unfinished[name] = size - progress.num_bytes.get(name, 0)
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
