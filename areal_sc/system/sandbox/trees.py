"""Processes and files that a program leaves: counted, and ended. Standard library alone."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

_TICKS_A_S: Final = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")
_BLOCK_BYTES: Final = 4096
_LONGEST_PATH: Final = 1024
"""Looks at deeper folders would take longer than programs may."""


@dataclass
class Use:
    """What processes use together.

    Attributes:
        cpu_s: also of children that have ended, and were waited for.
        resident_bytes: of memory; what forks share is counted for each.
    """

    num_processes: int = 0
    num_threads: int = 0
    cpu_s: float = 0.0
    resident_bytes: int = 0


def use_of(pids: list[int]) -> Use:
    """What these processes use; those that have ended meanwhile use nothing."""
    use = Use()
    for pid in pids:
        with suppress(OSError):
            with open(f"/proc/{pid}/stat", "rb") as file:  # its name is any bytes
                fields = file.read().rpartition(b")")[2].split()
            use.num_processes += 1
            use.num_threads += int(fields[17])
            use.cpu_s += sum(map(int, fields[11:15])) / _TICKS_A_S
            use.resident_bytes += int(fields[21]) * _PAGE_BYTES
    return use


def children(pid: int) -> list[int]:
    """Processes that this one has started or has to reap."""
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children of this process, and theirs."""
    found, waiting = [], [pid]
    while waiting:
        new = children(waiting.pop())
        found += new
        waiting += new
    return found


def num_tasks_of_user() -> int:
    """Processes and threads that this process's user has on this machine."""
    num = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                num += len(os.listdir(f"/proc/{name}/task"))
    return num


def end_descendants() -> None:
    """Kills and reaps all that this process, a subreaper, is an ancestor of.

    They are stopped first: what forks while it is killed would be one generation ahead for ever.
    """
    while True:
        stopped: set[int] = set()
        while new := set(descendants(os.getpid())) - stopped:
            for pid in new:
                _send(pid, signal.SIGSTOP)
            stopped |= new
        for pid in stopped:
            _send(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.0005)


def bytes_in(folder: str, limit: int) -> int:
    """Bytes of the disk that a folder takes, a block for each entry at least.

    More than `limit` where it cannot all be seen: folders are too deep, or closed.
    """
    used, waiting = 0, [folder]
    while waiting and used <= limit:
        above = waiting.pop()
        if len(above) > _LONGEST_PATH:
            return limit + 1
        try:
            for found in os.scandir(above):
                with suppress(FileNotFoundError):  # it has been deleted meanwhile
                    used += max(found.stat(follow_symlinks=False).st_blocks * 512, _BLOCK_BYTES)
                    if found.is_dir(follow_symlinks=False):
                        waiting.append(found.path)
        except FileNotFoundError:
            continue
        except OSError:
            return limit + 1
    return used


def deleted_bytes(pids: list[int]) -> int:
    """Bytes of files without a name that these processes hold open or mapped, but not this one."""
    used: dict[tuple[int, int], int] = {}
    for pid in pids:
        used.update(_deleted_files(pid))
    for file in _deleted_files(os.getpid()):
        used.pop(file, None)
    return sum(used.values())


def _deleted_files(pid: int) -> dict[tuple[int, int], int]:
    """Device and inode of each file without a name that a process holds, with its bytes."""
    held: dict[tuple[int, int], int] = {}
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            if line.endswith(b" (deleted)\n"):
                place, _, _, device, inode, *_ = line.split()
                first, last = (int(end, 16) for end in place.split(b"-"))
                major, minor = (int(part, 16) for part in device.split(b":"))
                file = os.makedev(major, minor), int(inode)
                held[file] = max(last - first, held.get(file, 0))
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{fd}")
                if found.st_nlink == 0:
                    held[found.st_dev, found.st_ino] = found.st_blocks * 512
    return held


def remove(folder: str) -> None:
    """Deletes a folder, however deep it is and whatever its permissions are.

    Its folders are moved up before they are emptied, so no path is long.
    """
    _open(folder)
    prefix, num_moved = f"{folder}/{os.urandom(8).hex()}", 0
    while folders := [found for found in os.scandir(folder) if _is_folder(found)]:
        for above in folders:
            _open(above.path)
            for found in list(os.scandir(above.path)):
                if _is_folder(found):
                    _open(found.path)
                    os.rename(found.path, f"{prefix}.{num_moved}")
                    num_moved += 1
            os.rmdir(above.path)
    os.rmdir(folder)


def _is_folder(found: os.DirEntry[str]) -> bool:
    """False: it is deleted now."""
    if not found.is_dir(follow_symlinks=False):
        os.unlink(found.path)
        return False
    return True


def _open(folder: str) -> None:
    with suppress(OSError):
        os.chmod(folder, 0o700)


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
