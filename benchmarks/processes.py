"""CPU seconds and resident memory of processes, as the kernel counts them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from areal_sc import RolloutController, TrainController

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_INTERVAL_S = 0.0005
_PEAK_INTERVAL_S = 0.5


def worker_pids(*controllers: TrainController | RolloutController) -> dict[str, int]:
    """Process ids of the controllers' workers, by name."""
    return {m.name: m.worker.pid for each in controllers for m in each.fleet.members}


def cpu_seconds(pids: Mapping[str, int]) -> dict[str, float]:
    """CPU seconds so far of the script, and of each worker with the processes below it."""
    used, children = _process_table()
    below = {name: _tree(pid, children) for name, pid in pids.items()}
    return {"script": used.get(os.getpid(), 0.0)} | {
        name: sum(used.get(pid, 0.0) for pid in tree) for name, tree in below.items()
    }


def process_tree(pid: int) -> list[int]:
    """The process and all below it."""
    return _tree(pid, _process_table()[1])


def resident_bytes(pid: int) -> dict[str, int]:
    """{"private", "shared"}: anonymous memory, and shared memory such as files in /dev/shm."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {
        name: int(values[key].split()[0]) * 1024
        for name, key in (("private", "RssAnon"), ("shared", "RssShmem"))
    }


@contextmanager
def memory_growth(pid: int, before: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """{"private", "shared"}: at most, during the block, over what the process had `before`.

    Samples the process from this one, every half millisecond.
    """
    growth = dict.fromkeys(before, 0)
    is_over = threading.Event()

    def sample() -> None:
        for name, size in resident_bytes(pid).items():
            growth[name] = max(growth[name], size - before[name])

    def watch() -> None:
        while not is_over.wait(_INTERVAL_S):
            sample()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield growth
    finally:
        is_over.set()
        watcher.join()
        sample()


def own_bytes(pid: int) -> int:
    """A process's memory, but for shared memory; pages that n processes have mapped count 1/n."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended
    sizes = {line.split()[0]: int(line.split()[1]) for line in lines[1:]}
    return (sizes["Pss:"] - sizes["Pss_Shmem:"]) * 1024 if sizes else 0


def shared_bytes() -> int:
    """Shared memory of the machine, also what no process has mapped, as files in /dev/shm."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Shmem:"))


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Samples the memory of all processes below this one, twice a second.

    That is their own, and what the machine's shared memory has grown by.

    Yields: a function that gives the highest sum so far.
    """
    peak, before = 0, shared_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not is_over.wait(_PEAK_INTERVAL_S):
            below = process_tree(os.getpid())[1:]
            peak = max(peak, sum(map(own_bytes, below)) + shared_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: peak
    finally:
        is_over.set()
        watcher.join()


def _process_table() -> tuple[dict[int, float], dict[int, list[int]]]:
    """CPU seconds, and the children, of every process of this machine."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has just ended
        # the name, in parentheses, may hold spaces
        fields = text.rpartition(")")[2].split()
        pid, parent = int(path.parent.name), int(fields[1])
        used[pid] = (int(fields[11]) + int(fields[12])) / _CLOCK_TICKS_PER_S
        children.setdefault(parent, []).append(pid)
    return used, children


def _tree(pid: int, children: Mapping[int, list[int]]) -> list[int]:
    return [pid, *(below for child in children.get(pid, ()) for below in _tree(child, children))]
