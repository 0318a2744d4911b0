"""The wire between the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_sc.config.fields import setting

AUTO: Final = "auto"
"""`shared_memory` that chooses a folder."""

MIN_ROOM_BYTES: Final = 1 << 30
"""Shared memory with less room is passed over: containers have 64 MiB unless asked for more."""


@dataclass
class TransportConfig:
    """The wire between processes."""

    bind: str = setting("auto", "IP address, interface, network (10.1.0.0/16), or 0.0.0.0: all")
    encrypt: bool = setting(
        False, "payload too; everything is authenticated and headers of RPC encrypted"
    )
    shared_memory: str = setting(AUTO, "auto (/dev/shm if it is large enough), off, or a folder")
    shared_memory_bytes: int = setting(
        0, "that auto wants free; 0: for weights and a batch, at least 1 GiB", ge=0
    )
    chunk_bytes: int = setting(
        4 << 20, "payload of one request, under one authentication tag", ge=1024, le=4 << 20
    )
    max_inflight_chunks: int = setting(
        4, "chunks requested from one owner and not yet received", ge=1
    )
    call_timeout_s: float = setting(
        600.0, "deadline of a call: a training step, or embedded generation's start", gt=0
    )
    write_timeout_s: float = setting(
        3600.0, "deadline of what waits for the run's disk, or reads the model", gt=0
    )
    pull_timeout_s: float = setting(300.0, "deadline of a pull", gt=0)
    stalled_peer_timeout_s: float = setting(30.0, "drop a peer that is silent for so long", gt=0)

    def __post_init__(self) -> None:
        if self.shared_memory == "False":  # what YAML makes of off
            self.shared_memory = "off"
