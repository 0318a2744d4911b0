"""The journal: every change of the ledger, on the disk before what follows from it is done.

    must be durable               before
    ----------------------------  ----------------------------------------------------------
    admission, requeue            the group's attempt is sent to a worker
    consumption                   its batch is given to the script, which trains on it
    trained, publication          the new version is announced: admission, updates and sweeps
    going back                    its lineage's first admission, like all records before one

    need not be                   because
    ----------------------------  ----------------------------------------------------------
    start, finish                 the worker can tell again
    rejection                     the group would run again, or its worker tells again
    release                       a step would be kept for longer
    taking back a step            its groups' new attempts, and their consumption, come after it

Records keep their order: what is durable is always a prefix of the ledger's history, so a rejection
that made room for an admission is durable with it, and a finish with the consumption of its rows.

consumes     records, from the ledger; they wait in memory
waits for    the disk: all that wait for it share one write and one sync, one at a time
unblocked by the end of that, or by its failure, which is final: after a failed sync nobody knows
             what is on the disk, so every later call raises, and the run ends

The files are `ledger/000001.journal` and so on, the *segments* of the journal. Each begins with the
whole state of the ledger, so a restart reads the newest one alone; the earlier ones stay unchanged,
as the account of the run. A new one begins with each start of the controllers, and when the newest
is large. It appears whole, once all before it is durable, so at every moment the newest segment
tells everything.

    areal_sc-ledger 1\\n                  a line: kind, and format version
    length | check | checksum | record    the first: `LedgerState`, all that was before
    length | check | checksum | record    each further one: a change of it, in order

`length` is that of the record in bytes, `check` the CRC-32 of the length, `checksum` that of the
record; each takes 4 bytes, little-endian. Since the length is checked by itself, a record that was
cut short at the end of a file is told from one that is damaged.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import msgspec

from areal_sc.controller.ledger.ledger import Ledger, replay
from areal_sc.controller.ledger.ledger_records import LedgerState, Publish, Record, Trained
from areal_sc.errors import LedgerError, RunFolderError, WaitTimeout
from areal_sc.fleet.worker_life import RunFailed
from areal_sc.system.disk import AppendedFile, Disk
from areal_sc.system.durable import os_errors_as
from areal_sc.system.waiting import bounded

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


def _damaged(path: Path, at: int, found: str) -> RunFolderError:
    return RunFolderError(
        f"{path} is damaged at byte {at}: {found}. Nothing goes on from it. Move the folder "
        f"{path.parent} away to start from the newest snapshot, with an account that begins there"
    )


logger = logging.getLogger(__name__)

SEGMENT_BYTES = 4 << 20
"""A restart reads about as much: some 50,000 records, in well under a second."""

STATE_SHARE = 4
"""A segment is at least so many times its first record, so that states are a small part of all."""

_SUFFIX = ".journal"


@dataclass
class _Part:
    """Frames that wait to be written; those of a new segment begin with its state."""

    is_segment: bool
    frames: list[bytes] = field(default_factory=list)


class Journal:
    """Writes the journal of one ledger to a folder, which is made when it is needed.

    Args:
        hear: takes the failure of the run, if nothing can be written any more.
        limit_s: `transport.write_timeout_s`: a disk that does not answer for so long has failed.
    """

    def __init__(
        self,
        folder: Path,
        disk: Disk,
        hear: Callable[[RunFailed], None] = lambda event: None,
        limit_s: float = 3600.0,
    ) -> None:
        self._limit_s = limit_s
        self._hear = hear
        self._folder = folder
        self._disk = disk
        self._take_state: Callable[[], LedgerState] = LedgerState
        self._waiting: list[_Part] = []
        self._num_appended = 0
        self._num_durable = 0
        self._segment_bytes = 0
        self._max_segment_bytes = 0
        self._num_bytes = 0  # of the file
        self._commit: asyncio.Task[None] | None = None
        self._failure: RunFolderError | None = None
        self._path = folder  # of the newest segment, once it is known
        self._file: AppendedFile | None = None

    def begin(self, take_state: Callable[[], LedgerState]) -> None:
        """Begins a segment, with a new start.

        Args:
            take_state: the ledger's state, with all that was appended; also called later.
        """
        self._take_state = take_state
        frame = to_frame(take_state())
        self._waiting.append(_Part(is_segment=True))
        self._segment_bytes = 0
        self._max_segment_bytes = max(SEGMENT_BYTES, STATE_SHARE * len(frame))
        self._add(frame)

    def exists(self) -> bool:
        """Whether an earlier start has left one."""
        return any(name.endswith(_SUFFIX) for name in self._disk.names(self._folder))

    def take_up(self, ledger: Ledger) -> Ledger:
        """The ledger as earlier starts have left it, else the given one; its changes are written.

        Raises: RunFolderError: see `ledger_on_disk`.
        """
        remembers_prompts = ledger.remembers_prompts
        ledger = (
            ledger_on_disk(self._folder, self._disk, remembers_prompts=remembers_prompts) or ledger
        )
        self.begin(ledger.snapshot)
        ledger.journal = self.append
        return ledger

    def append(self, record: Record) -> None:
        """Adds a change that the ledger is about to make; `durable` waits until it is on the disk.

        Raises: RunFolderError: the journal has failed.
        """
        if self._failure is not None:
            raise self._failure
        is_full = self._segment_bytes > self._max_segment_bytes
        if is_full and not isinstance(record, Publish):  # see `read_segment`
            self.begin(self._take_state)
        self._add(to_frame(record))

    async def durable(self) -> None:
        """Returns when everything that was appended before the call is on the disk.

        Raises: RunFolderError: it cannot be written; or what an earlier process left in the folder
            is damaged.
        """
        wanted = self._num_appended
        while self._num_durable < wanted:
            if self._failure is not None:
                raise self._failure
            if self._commit is None or self._commit.done():
                self._commit = asyncio.create_task(self._write_waiting(), name="journal")
            await asyncio.shield(self._commit)  # also others wait for it

    async def close(self) -> None:
        """Writes what waits, unless the journal has failed; a later `begin` opens it again."""
        if self._failure is None:
            await self.durable()
        if self._file is not None:
            self._file.close()
        self._file, self._path = None, self._folder

    def _add(self, frame: bytes) -> None:
        if not self._waiting:
            self._waiting.append(_Part(is_segment=False))
        self._waiting[-1].frames.append(frame)
        self._num_appended += 1
        self._segment_bytes += len(frame)

    async def _write_waiting(self) -> None:
        parts, self._waiting = self._waiting, []
        num_appended = self._num_appended
        try:
            what = f"the disk of {self._folder} to take records of the ledger"
            written = self._disk.run(lambda: self._write(parts))
            await bounded(written, self._limit_s, what, "transport.write_timeout_s")
        except RunFolderError as error:
            self._failure = error
        except WaitTimeout as error:
            self._failure = RunFolderError(f"{error}; the run ends, as after a failed write")
        except OSError as error:
            self._failure = RunFolderError(
                f"cannot write {self._path}: {error.strerror}. The run ends, since it could not "
                "tell after a crash what was trained; make room or choose another disk, and start "
                "it again: it goes on from its newest snapshot"
            )
        else:
            self._num_durable = num_appended
        if self._failure is not None:
            self._hear(RunFailed(self._failure))

    def _write(self, parts: list[_Part]) -> None:
        """Blocks until all is on the disk."""
        for part in parts:
            content = b"".join(part.frames)
            if part.is_segment:
                self._write_segment(content)
            else:
                self._append(content)

    def _append(self, content: bytes) -> None:
        """All of it is on the disk afterwards, or none of it, as far as the disk still answers."""
        assert self._file is not None
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._file.sync()
        except OSError:
            with suppress(OSError):
                self._disk.cut(self._path, self._num_bytes)
            raise
        self._num_bytes += len(content)

    def _write_segment(self, content: bytes) -> None:
        number = _number(self._path) if self._file is not None else self._last_number()
        if self._file is not None:
            self._file.close()
        self._path = _path(self._folder, number + 1)
        self._disk.create(self._path, HEADER + content)
        self._file = self._disk.append_to(self._path)
        self._num_bytes = len(HEADER) + len(content)

    def _last_number(self) -> int:
        """Number of the newest segment that earlier processes left, after what their crashes left
        is cut off; 0: there is none."""
        names = self._disk.names(self._folder)
        for name in names:
            if name.endswith(".partial"):
                self._disk.remove(self._folder / name)
        newest = max((n for n in names if n.endswith(_SUFFIX)), default=None)
        if newest is None:
            return 0
        self._path = self._folder / newest
        content = self._disk.read(self._path)
        num_bytes = read_segment(content, self._path).num_bytes
        if num_bytes < len(content):
            cut = len(content) - num_bytes
            logger.warning("journal=%s a last record was cut short: bytes=%d", self._path, cut)
            self._disk.cut(self._path, num_bytes)
        return _number(self._path)


def ledger_on_disk(folder: Path, disk: Disk, *, remembers_prompts: bool = False) -> Ledger | None:
    """The ledger as the journal in a folder tells it; None: there is no journal.

    Args: remembers_prompts: see `Ledger`.
    Raises: RunFolderError: its newest segment is damaged, or of another format.
    """
    try:
        newest = max((name for name in disk.names(folder) if name.endswith(_SUFFIX)), default=None)
        if newest is None:
            return None
        content = disk.read(folder / newest)
    except OSError as error:
        raise RunFolderError(f"cannot read {error.filename}: {error.strerror}") from error
    segment = read_segment(content, folder / newest)
    ledger = Ledger.restore(segment.state, remembers_prompts=remembers_prompts)
    try:
        replay(ledger, segment.records)
    except LedgerError as error:
        raise RunFolderError(f"{folder / newest} does not follow on itself: {error}") from error
    return ledger


def segment_paths(folder: Path, disk: Disk) -> list[Path]:
    """The journal's segments, oldest first.

    Raises: RunFolderError: one is missing.
    """
    names = sorted(name for name in disk.names(folder) if name.endswith(_SUFFIX))
    paths = [_path(folder, number) for number in range(1, len(names) + 1)]
    for path in paths:
        if path.name not in names:
            raise RunFolderError(f"{path} is missing: {folder} has {', '.join(names)}")
    return paths


def read_segments(folder: Path, disk: Disk) -> Iterator[tuple[Path, Segment, int]]:
    """Each of the journal's segments, oldest first: its path, what is in it, and its bytes.

    Raises: RunFolderError: there is none, or one is damaged, or of another format.
    """
    paths = segment_paths(folder, disk)
    if not paths:
        raise RunFolderError(f"there is no journal in {folder}: no training step has begun")
    for path in paths:
        with os_errors_as(RunFolderError, f"cannot read {path}"):
            content = disk.read(path)
        yield path, read_segment(content, path), len(content)


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}{_SUFFIX}"


def _number(path: Path) -> int:
    return int(path.stem)
