"""What the control groups of this process leave to it: memory and cores of its container.

A limit of any group above counts, too: of a container's own, a SLURM job's, or a slice of systemd.
Both versions of control groups are read, and both at one time: a hybrid system has each
controller in one of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")
"""`proc` and `sys` are under it."""

_RECLAIMED: Final = ("inactive_file", "active_file", "slab_reclaimable")
"""What the kernel gives back before memory is short; `MemAvailable` counts these, too."""


def groups(controller: str, root: Path = ROOT) -> Iterator[Path]:
    """The folders of this process's groups that may limit something, each before those above it.

    Args:
        controller: `memory` or `cpu`.
    """
    base = root / "sys/fs/cgroup"
    paths = dict[str, str]()
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            paths |= dict.fromkeys(controllers.split(","), path)
    trees = [(base, ""), (base / "unified", "")]  # version 2 has one tree, without a name
    with suppress(OSError):
        own = (path for path in base.iterdir() if controller in path.name.split(","))
        trees += [(path, controller) for path in own]
    for tree, name in trees:
        parts = [part for part in paths.get(name, "").split("/") if part not in ("", "..")]
        # a container may see its own group as the whole tree, and be told its path on the host
        while parts and not tree.joinpath(*parts).is_dir():
            del parts[0]
        for depth in range(len(parts), -1, -1):
            yield tree.joinpath(*parts[:depth])


def memory_left(root: Path = ROOT) -> int | None:
    """Bytes that can still be taken under every limit; None: there is no limit.

    The page cache counts as free, as the kernel gives it back.
    """
    rooms = []
    for folder in groups("memory", root):
        limits = _numbers(folder, "memory.max", "memory.high", "memory.limit_in_bytes")
        used = _numbers(folder, "memory.current", "memory.usage_in_bytes")
        if limits and used:
            rooms.append(max(0, min(limits) - max(0, used[0] - _reclaimed_bytes(folder))))
    return min(rooms, default=None)


def num_cores(root: Path = ROOT) -> int:
    """Cores that this process can use at one time: those it may run on, within its quota.

    A part of a core counts as one.
    """
    cores = len(os.sched_getaffinity(0))
    for folder in groups("cpu", root):
        quota = _numbers(folder, "cpu.max") or _numbers(
            folder, "cpu.cfs_quota_us", "cpu.cfs_period_us"
        )
        if len(quota) == 2 and quota[0] > 0:  # version 1 says -1 where there is none
            cores = min(cores, -(-quota[0] // quota[1]))
    return cores


def _reclaimed_bytes(folder: Path) -> int:
    """What the kernel can give back of the memory of a group and of those below it."""
    sizes = dict[str, int]()
    with suppress(OSError, ValueError):
        for line in (folder / "memory.stat").read_text().splitlines():
            name, _, size = line.partition(" ")
            sizes[name] = int(size)
    # in version 1 the plain names leave out what the groups below it have
    return sum(sizes.get(f"total_{name}", sizes.get(name, 0)) for name in _RECLAIMED)


def _numbers(folder: Path, *names: str) -> list[int]:
    """The numbers in those of the files that are there; a limit of `max` is none."""
    found = list[int]()
    for name in names:
        with suppress(OSError, ValueError):
            found += map(int, (folder / name).read_text().split())
    return found
