"""Locks on files that end with their process, however that ends."""

from __future__ import annotations

import fcntl
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Final

_OWNER_ONLY: Final = 0o600
_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class HeldLock:
    """A lock of this process, until it is closed or the process ends.

    A child of a fork gives its copy up, and so does not prolong it.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.register_at_fork(after_in_child=partial(_close_if_alive, weakref.ref(self)))

    @property
    def is_held(self) -> bool:
        return self._fd >= 0

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def take_lock(path: Path, kind: int) -> HeldLock | None:
    """A lock on the file that has this name, which is made if needed.

    Args:
        kind: `fcntl.LOCK_SH` or `LOCK_EX`.
    Returns: None when somebody else's lock is in the way, or the folder is gone or just going.
    Raises: OSError: the folder cannot be written, or its file system has no locks.
    """
    try:
        fd = os.open(path, _FLAGS, _OWNER_ONLY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        # whoever held it before may have deleted it: then the lock is one on nothing
        is_same = os.path.samestat(os.fstat(fd), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        is_same = False
    except BaseException:
        os.close(fd)
        raise
    if is_same:
        return HeldLock(fd)
    os.close(fd)
    return None


def is_locked(path: Path) -> bool:
    """Whether another process, or another part of this one, has the file locked for itself.

    Raises: OSError: the file cannot be opened, or its file system has no locks.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _close_if_alive(lock: weakref.ref[HeldLock]) -> None:
    alive = lock()
    if alive is not None:
        alive.close()
