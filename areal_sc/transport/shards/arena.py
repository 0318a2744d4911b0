"""The files of one arena: blocks that hold shards, and a ticket for each sealed shard. No torch."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from areal_sc.errors import ProtocolError
from areal_sc.system.file_lock import HeldLock
from areal_sc.transport.shards.mapped_file import ShardLocks

_BLOCK: Final = "block-"
_OWNER_ONLY_FILE: Final = 0o600
_PAGE_BYTES: Final = 4096

logger = logging.getLogger(__name__)


class Arena:
    """The shards of one incarnation of a worker: a folder that this process owns.

    No file is named by what came over a socket.

    Attributes:
        incarnation: of the worker that made it.
        locks: tell which shards are being read.
    Raises: OSError: the folder cannot be used.
    """

    def __init__(self, path: Path, incarnation: str, lock: HeldLock) -> None:
        self.path = path
        self.incarnation = incarnation
        self.locks = ShardLocks(readers_path(str(path)))
        self._lock = lock

    @property
    def is_owned(self) -> bool:
        """False in a child of a fork, which must change nothing, and after `close`."""
        return self._lock.is_held

    def file_path(self, name: str) -> str:
        return f"{self.path}/{name}"

    def reserve(self, name: str, num_bytes: int) -> None:
        """Makes a file, so that writing to it cannot fail later. Raises: OSError: no room."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(self.file_path(name), flags, _OWNER_ONLY_FILE)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError:
            self.delete(name)
            raise
        finally:
            os.close(fd)

    @property
    def free_bytes(self) -> int:
        """Room on its file system."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def link(self, sequence: int, block: str) -> None:
        """Makes a shard visible to other processes. Raises: OSError: there is no room."""
        os.symlink(block, self.file_path(str(sequence)))

    def delete(self, name: str) -> None:
        """Deletes a file, if it is there; what is mapped of it stays readable."""
        with suppress(FileNotFoundError):
            os.unlink(self.file_path(name))

    def sequences(self) -> list[int]:
        """Numbers of the sealed shards, ascending."""
        return sorted(int(name) for name in os.listdir(self.path) if name.isdecimal())

    def block_names(self) -> set[str]:
        return {name for name in os.listdir(self.path) if name.startswith(_BLOCK)}

    def remove(self) -> None:
        """Deletes the arena. Memory that is mapped stays readable."""
        if self.is_owned:
            delete_folder(self.path)
        self.close()

    def close(self) -> None:
        """Gives up the ownership; a successor may take the arena over."""
        self._lock.close()


def readers_path(arena: str) -> str:
    """The file whose locks tell which shards are being read."""
    return f"{arena}/readers"


def block_path(arena: str, sequence: int) -> str:
    """The block of a sealed shard, while the shard may be opened.

    Raises: FileNotFoundError: it is gone. ProtocolError: it is not a ticket.
    """
    try:
        name = os.readlink(f"{arena}/{sequence}")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        name = "not a link"
    if not name.startswith(_BLOCK) or "/" in name:
        raise ProtocolError(f"{arena}/{sequence} is not the ticket of a shard: {name!r:.80}")
    return f"{arena}/{name}"


def delete_folder(path: Path) -> None:
    """Deletes a folder, links as links. Others may delete the same one at the same time."""
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        logger.warning("%s could not be deleted; a later run tries again", path)


def block_span(num_bytes: int) -> int:
    """Bytes of the block that a shard of `num_bytes` takes: whole pages."""
    return max(1, -(-num_bytes // _PAGE_BYTES)) * _PAGE_BYTES
