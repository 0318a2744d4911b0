"""The board of a node: a small file for each worker that says when it was alive, for all to read.

    <folder>/<role>-<index>.beat    written by that worker alone, in place
             lease                  when a controller was last heard on this node

Every worker of the node reads the whole board, so a controller that asks one of them hears of all.
Times are `CLOCK_MONOTONIC` nanoseconds, the same in all processes of a node; what leaves the node
are ages. A record has a checksum: one that is torn, or is something else, counts as not there.
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
import zlib
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Annotated, Final

from msgspec import Meta, Struct

from areal_sc.errors import TransportError
from areal_sc.transport.rpc.method import Method

BLOCKED_WARNING_S: Final = 10.0
"""So long without a turn of a worker's main event loop is worth a warning."""

_BEAT: Final = struct.Struct("<4sIQQ32s32s")
"""Magic, process id, time of the beat, time of the last turn, name, incarnation."""
_BEAT_MAGIC: Final = b"ASB1"
_LEASE: Final = struct.Struct("<4sQ")
_LEASE_MAGIC: Final = b"ASL1"
_CHECKSUM: Final = struct.Struct("<I")
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,16}/[0-9]{1,8}")
_INCARNATION: Final = re.compile(r"[A-Za-z0-9_-]{1,32}")
_SUFFIX: Final = ".beat"
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_Age = Annotated[float, Meta(ge=0)]
_READS: Final = 2
"""A reader that meets a writer looks again."""


def this_node() -> str:
    """Names the node: processes with the same name share a boot, and so a clock and a board."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}/{boot}"


class Beat(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a worker last said of itself.

    Attributes:
        name: e.g. `rollout/0`.
        beat_age_s: since its process was last seen alive.
        turn_age_s: since its main event loop was last seen turning.
    """

    name: str
    incarnation: str
    pid: int
    beat_age_s: _Age
    turn_age_s: _Age


BEAT: Final = Method("beat", NoneType, tuple[Beat, ...])
"""Asks a worker's heartbeat socket for the beats of all workers of its node."""


class BeatBoard:
    """One process's view of the board of its node.

    Args:
        folder: the same for all workers of a run on this node; made if needed, for this user alone.
    Raises: TransportError: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fds: dict[str, int] = {}
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise TransportError(f"heartbeats cannot be written to {folder}: {error}") from error

    def write(self, name: str, incarnation: str, turn_ns: int) -> None:
        """This process is alive now, and its main event loop turned at `turn_ns`.

        Raises: OSError: the file cannot be written.
        """
        assert _NAME.fullmatch(name), name
        assert _INCARNATION.fullmatch(incarnation), incarnation
        record = _BEAT.pack(
            _BEAT_MAGIC,
            os.getpid(),
            time.monotonic_ns(),
            turn_ns,
            name.encode(),
            incarnation.encode(),
        )
        self._write(_file_name(name), record)

    def read_all(self) -> list[Beat]:
        """The last beat of every worker that ever wrote one here and did not remove it."""
        beats = []
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            names = sorted(entry.name for entry in entries if entry.name.endswith(_SUFFIX))
            for file_name in names:
                beat = self._read_beat(file_name)
                if beat is not None:
                    beats.append(beat)
        return beats

    def remove(self, name: str) -> None:
        """The worker ends; nothing is left of it."""
        file_name = _file_name(name)
        self._close(file_name)
        with suppress(OSError):
            os.unlink(self._folder / file_name)

    def renew_lease(self) -> None:
        """A controller was heard now. Raises: OSError: the file cannot be written."""
        self._write("lease", _LEASE.pack(_LEASE_MAGIC, time.monotonic_ns()))

    def lease_age_s(self) -> float | None:
        """How long ago a controller was heard on this node; None: never."""
        record = self._read("lease", _LEASE.size)
        if record is None:
            return None
        magic, renewed_ns = _LEASE.unpack(record)
        return _age_s(renewed_ns) if magic == _LEASE_MAGIC else None

    def close(self) -> None:
        """Closes the files."""
        for file_name in list(self._fds):
            self._close(file_name)

    def _read_beat(self, file_name: str) -> Beat | None:
        record = self._read(file_name, _BEAT.size)
        if record is None:
            return None
        magic, pid, beat_ns, turn_ns, raw_name, raw_incarnation = _BEAT.unpack(record)
        name = raw_name.rstrip(b"\0").decode("ascii", "replace")
        incarnation = raw_incarnation.rstrip(b"\0").decode("ascii", "replace")
        is_ours = (
            magic == _BEAT_MAGIC
            and _NAME.fullmatch(name) is not None
            and _INCARNATION.fullmatch(incarnation) is not None
            and _file_name(name) == file_name
        )
        return Beat(name, incarnation, pid, _age_s(beat_ns), _age_s(turn_ns)) if is_ours else None

    def _write(self, file_name: str, record: bytes) -> None:
        fd = self._fds.get(file_name)
        if fd is None:
            fd = os.open(self._folder / file_name, os.O_WRONLY | os.O_CREAT | _OPEN, 0o600)
            self._fds[file_name] = fd
        os.pwrite(fd, record + _CHECKSUM.pack(zlib.crc32(record)), 0)

    def _read(self, file_name: str, num_bytes: int) -> bytes | None:
        try:
            fd = os.open(self._folder / file_name, os.O_RDONLY | _OPEN)
        except OSError:
            return None
        try:
            for _ in range(_READS):
                content = os.pread(fd, num_bytes + _CHECKSUM.size + 1, 0)
                record, checksum = content[:num_bytes], content[num_bytes:]
                if checksum == _CHECKSUM.pack(zlib.crc32(record)):
                    return record
            return None
        except OSError:  # a folder, for instance
            return None
        finally:
            os.close(fd)

    def _close(self, file_name: str) -> None:
        fd = self._fds.pop(file_name, None)
        if fd is not None:
            os.close(fd)


def _file_name(name: str) -> str:
    return name.replace("/", "-") + _SUFFIX


def _age_s(then_ns: int) -> float:
    return max(0, time.monotonic_ns() - then_ns) / 1e9
