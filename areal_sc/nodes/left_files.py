"""Files that killed workers and servers leave in a node's shared memory. No torch.

A server that ends by itself deletes them, and so does the worker that ends its server. A worker
deletes the buckets from which its servers load weights. Whatever was killed with `kill -9` cannot,
so its agent does.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from areal_sc.engines.handles import LEFT_FILES
from areal_sc.transport.shards.memory_folder import SHARED_MEMORY


def delete_left_files(
    since_s: float, ended_pids: Iterable[int] = (), folder: Path = SHARED_MEMORY
) -> None:
    """Deletes files of this user that no process has open or maps.

    Args:
        since_s: Unix time; files that have not changed since then are left alone.
        ended_pids: of workers. torch names shared memory by the process that has made it.
    """
    patterns = (*LEFT_FILES, *(f"torch_{pid}_*" for pid in ended_pids))
    left = set()
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        with suppress(FileNotFoundError):
            status = path.stat(follow_symlinks=False)
            if status.st_uid == os.geteuid() and status.st_ctime >= since_s:
                left.add(str(path))
    if left:
        left -= _used(left)
    for name in left:
        Path(name).unlink(missing_ok=True)


def _used(names: set[str]) -> set[str]:
    """The files among these that a process has open or maps.

    A process opens a file, maps it, and closes it. So its open files are looked at first: whoever
    has none of them open any more maps it by then.
    """
    used = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            used |= set(_opened(process)) & names
            maps = (process / "maps").read_text(errors="replace")
            used |= {name for name in names if f" {name}\n" in maps}
    return used


def _opened(process: Path) -> Iterator[str]:
    for fd in (process / "fd").iterdir():
        with suppress(FileNotFoundError):  # it was closed
            yield os.readlink(fd)
