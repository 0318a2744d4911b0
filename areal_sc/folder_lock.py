"""The lock of a run folder. One process holds it, until it releases it or ends in any way."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from areal_sc.errors import RunFolderError

LOCK_NAME: Final = ".lock"

_WAIT_S: Final = 1.0
"""The fork server of a killed run holds the lock for a moment, while it cleans up."""


class FolderLock:
    """The kernel's lock (`flock`) on a file of the folder, which holds its owner's process id.

    A process forked from the owner without `exec` shares the lock and must not outlive it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._fd: int | None = None

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def take(self) -> None:
        """Raises: RunFolderError: another process has it; OSError: the folder is not usable."""
        assert self._fd is None, f"run folder {self._folder} is open already"
        give_up = time.monotonic() + _WAIT_S
        while not self.take_if_free():
            if time.monotonic() > give_up:
                raise self._in_use()
            time.sleep(0.05)
        assert self._fd is not None
        os.ftruncate(self._fd, 0)
        os.write(self._fd, f"{os.getpid()}\n".encode())

    def check_free(self) -> None:
        """Takes nothing, and makes no file.

        Raises: RunFolderError: another process has it; OSError: the folder is not usable.
        """
        if not (self._folder / LOCK_NAME).exists():
            return
        if not self.take_if_free():
            raise self._in_use()
        self.release()

    def _in_use(self) -> RunFolderError:
        pid = (self._folder / LOCK_NAME).read_text(errors="replace").strip()
        owner = f"process {pid}" if pid else "another process"
        return RunFolderError(
            f"run folder {self._folder}: {owner} is running in it; "
            "wait for it, stop it, or choose another run_dir"
        )

    def take_if_free(self) -> bool:
        """Raises: OSError: the folder is not usable."""
        fd = os.open(self._folder / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Does nothing when it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
