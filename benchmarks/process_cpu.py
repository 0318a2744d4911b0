"""CPU seconds of this process and of the workers that it started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from areal_sc import RolloutController, TrainController

_CLOCK_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


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


def _tree(pid: int, children: Mapping[int, Sequence[int]]) -> list[int]:
    below = [_tree(child, children) for child in children.get(pid, ())]
    return [pid, *(descendant for tree in below for descendant in tree)]
