"""The folder that the processes of a run share on one node. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from areal_sc.transport.arena.folder import ArenaFolder, choose_root

OFF: Final = "off"
"""`transport.shared_memory` that keeps tensors out of it; the heartbeats' small files stay."""

MIN_ROOM_BYTES: Final = 1 << 30
"""Shared memory with less room is passed over: containers have 64 MiB unless asked for more."""


def memory_root(shared_memory: str, run_dir: Path) -> Path:
    """Where the shared memory of runs lies on this node, as `transport.shared_memory` says."""
    if shared_memory == OFF:
        return choose_root("auto", 0, run_dir / "shared_memory")
    return choose_root(shared_memory, MIN_ROOM_BYTES, run_dir / "shared_memory")


def beats_folder(run: ArenaFolder) -> Path:
    """Where the heartbeats of a run are noted on this node."""
    return run.path / "beats"
