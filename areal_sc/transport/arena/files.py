"""The files of one arena: segments with blocks of shards, and a ticket for each sealed shard.

No torch. Nothing here is named by what came over a socket: numbers name files, and the folder is
one that was listed.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from areal_sc.file_lock import HeldLock

_SEGMENT: Final = "segment-"
_OWNER_ONLY_FILE: Final = 0o600
_OPEN: Final = os.O_CLOEXEC | os.O_NOFOLLOW

logger = logging.getLogger(__name__)


class ArenaFiles:
    """The files of one arena, owned by this process.

    Attributes:
        incarnation: of the worker that made it.
    """

    def __init__(self, path: Path, incarnation: str, lock: HeldLock) -> None:
        self.path = path
        self.incarnation = incarnation
        self._lock = lock

    @property
    def is_owned(self) -> bool:
        """False in a child of a fork, which must change nothing, and after `close`."""
        return self._lock.is_held

    def create_segment(self, number: int, num_bytes: int) -> None:
        """Makes a file and reserves its space: writing to it cannot fail later.

        Raises: OSError: there is no room.
        """
        path = self.segment_path(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN, _OWNER_ONLY_FILE)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)

    def segment_path(self, number: int) -> str:
        return segment_path(str(self.path), number)

    def segment_bytes(self, number: int) -> int:
        return os.stat(self.segment_path(number)).st_size

    def remove_segment(self, number: int) -> None:
        """What is mapped stays readable."""
        with suppress(FileNotFoundError):
            os.unlink(self.segment_path(number))

    def segments(self) -> list[int]:
        """Numbers of the segments."""
        names = [e.name for e in self._files() if e.name.startswith(_SEGMENT)]
        return sorted(int(name.removeprefix(_SEGMENT)) for name in names)

    def write_ticket(self, sequence: int, content: bytes) -> None:
        """Makes a shard visible to other processes: from now on its ticket is there, whole.

        Raises: OSError: there is no room.
        """
        target = ticket_path(str(self.path), sequence)
        unfinished = f"{self.path}/.{sequence}.partial"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _OPEN
        fd = os.open(unfinished, flags, _OWNER_ONLY_FILE)
        try:
            while content:
                content = content[os.write(fd, content) :]
            os.rename(unfinished, target)
        except OSError:
            with suppress(OSError):
                os.unlink(unfinished)
            raise
        finally:
            os.close(fd)

    def read_ticket(self, sequence: int) -> bytes:
        return Path(ticket_path(str(self.path), sequence)).read_bytes()

    def remove_ticket(self, sequence: int) -> None:
        """No reader that looks from now on gets at the shard."""
        with suppress(FileNotFoundError):
            os.unlink(ticket_path(str(self.path), sequence))

    def tickets(self) -> list[int]:
        """Sequence numbers of the sealed shards, ascending."""
        return sorted(int(e.name) for e in self._files() if e.name.isdecimal())

    def remove(self) -> None:
        """Deletes the arena. Memory that is mapped stays readable."""
        if self.is_owned:
            delete_folder(self.path)
        self.close()

    def close(self) -> None:
        """Gives up the ownership; a successor may take the arena over."""
        self._lock.close()

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with os.scandir(self.path) as entries:
            yield from entries


def ticket_path(arena: str, sequence: int) -> str:
    """The file that exists as long as the shard may be opened."""
    return f"{arena}/{sequence}"


def segment_path(arena: str, number: int) -> str:
    """The file that holds blocks. A number is never used twice."""
    return f"{arena}/{_SEGMENT}{number}"


def delete_folder(path: Path) -> None:
    """Deletes a folder, links as links. Others may delete the same one at the same time."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be deleted; a later run tries again", path)
