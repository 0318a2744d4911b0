"""Files mapped into memory, and the locks that say which shards are being read.

libc is called directly because `mmap.mmap` holds the GIL while it maps (256 MiB of new pages take
a tenth of a second) and keeps a descriptor.
"""

from __future__ import annotations

import ctypes
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


class ShardLocks:
    """A file of which byte n is locked as long as shard n of an arena is read.

    The locks are open file description locks (`fcntl(2)`, F_OFD_SETLK): the kernel releases them
    when their holder dies, however it dies, and the last child of a fork with a copy of it.

    Raises: OSError: the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False

    def lock(self, number: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, number))

    def unlock(self, number: int) -> None:
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, number))

    def is_locked_elsewhere(self, number: int) -> bool:
        """Some other `ShardLocks` of the file, in whatever process, has locked the number."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, number))
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def close(self) -> None:
        self._close()


def map_file(path: str, *, writable: bool) -> NDArray[np.uint8]:
    """A whole file in memory, shared with all processes that map it.

    The pages stay mapped until the last array or view of them is gone, also when the file is gone
    before.

    Args:
        path: of the file.
        writable: True fills the page table at once, so that no later access faults. False: writing
            is a segmentation fault, though the array does not say so (torch warns of buffers that
            do). A private copy of written pages (ACCESS_COPY) would keep old contents when the file
            is used for another shard.
    Raises: OSError: the file is empty, or cannot be mapped.
    """
    fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        num_bytes = os.fstat(fd).st_size
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if writable else 0)
        libc = _libc()
        address = libc.mmap(None, num_bytes, protection, flags, fd, 0)
    finally:
        os.close(fd)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    mapping = _Mapping(address, num_bytes)
    # not at exit: other code that still runs then may hold a view
    weakref.finalize(mapping, libc.munmap, address, num_bytes).atexit = False
    return np.asarray(mapping)


class _Mapping:
    """Base of the array over mapped memory; numpy keeps it as long as any view of the array."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address, False),
        }


def _flock(kind: int, number: int) -> bytes:
    return _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = address
    libc.mmap.argtypes = (address, size, number, number, number, ctypes.c_long)
    libc.munmap.argtypes = (address, size)
    return libc
