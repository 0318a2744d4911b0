"""Files mapped into memory, and locks on parts of them that end with their holder.

The locks are open file description locks (`fcntl(2)`, F_OFD_SETLK): they belong to a descriptor
and not to a process, so that closing another descriptor of the same file in this process does not
release them, and the kernel does when the holder dies, however it dies.

libc is called directly because `mmap.mmap` holds the GIL while it maps (256 MiB of new pages take
a tenth of a second) and keeps a descriptor.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import struct
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_FLOCK: Final = struct.Struct("@hhqqi0q")
"""`struct flock`: type, whence, start, length, pid (0 for these locks), padding."""
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class MappedFile:
    """A whole file in memory, shared with all processes that map it.

    The pages stay mapped until the last array or view of `memory` is gone, also when this object
    and the file are gone before.

    Args:
        path: of the file.
        writable: False: writing to `memory` is a segmentation fault, though the array does not say
            so (torch warns of buffers that do). A private copy of written pages (ACCESS_COPY)
            would keep old contents when their block is reused.
        populate: the page table is filled at once, so that no later access faults.
    Raises: OSError: the file is empty, is just being deleted, or cannot be mapped.
    """

    def __init__(self, path: str, *, writable: bool, populate: bool = False) -> None:
        flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW
        mapped_fd = os.open(path, flags)
        try:
            self.num_bytes = os.fstat(mapped_fd).st_size
            self.memory = _map(mapped_fd, self.num_bytes, writable=writable, populate=populate)
        finally:
            os.close(mapped_fd)
        # a description of its own: that of the mapping, and with it any lock, lives on in children
        self._fd = os.open(path, flags)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    @property
    def is_unlinked(self) -> bool:
        """The file has no name any more."""
        return os.fstat(self._fd).st_nlink == 0

    def lock(self, start: int, size: int) -> None:
        """Says that these bytes are being read."""
        self._set_lock(fcntl.F_RDLCK, start, size)

    def unlock(self, start: int, size: int) -> None:
        """Takes `lock` back. In a child of a fork, which owns no lock, nothing happens."""
        if self._close.alive:
            self._set_lock(fcntl.F_UNLCK, start, size)

    def is_locked_elsewhere(self, start: int, size: int) -> bool:
        """Some other descriptor of the file, in whatever process, holds a lock on such a byte."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, size, 0)
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, asked)
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def punch_hole(self, start: int, size: int) -> None:
        """Gives the pages back to the system; they read as zeros from now on.

        Where the file system cannot do that, they stay until the file is gone.
        """
        address = self.memory.ctypes.data + start
        try:
            _checked(_libc().madvise(address, size, mmap.MADV_REMOVE))
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise

    def close(self) -> None:
        """Closes the descriptor, and with it releases all locks made by it."""
        self._close()

    def _set_lock(self, kind: int, start: int, size: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, size, 0))


class _Mapping:
    """Base of the array over mapped memory; numpy keeps it as long as any view of the array."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def _map(fd: int, num_bytes: int, *, writable: bool, populate: bool) -> NDArray[np.uint8]:
    libc = _libc()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = libc.mmap(None, num_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        _checked(-1)
    mapping = _Mapping(address, num_bytes)
    # not at exit: other code that still runs then may hold a view
    weakref.finalize(mapping, libc.munmap, address, num_bytes).atexit = False
    return np.asarray(mapping)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (address, size)
    libc.madvise.argtypes = (address, size, number)
    return libc


def _checked(result: int) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
