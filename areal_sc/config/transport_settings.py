"""The wire between the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from areal_sc.config.fields import in_code, setting

AUTO: Final = "auto"
"""`shared_memory` that chooses a folder."""

MIN_ROOM_BYTES: Final = 1 << 30
"""Shared memory with less room is passed over: containers have 64 MiB unless asked for more."""


@dataclass
class TransportConfig:
    """The wire between processes.

    Attributes:
        shared_memory_bytes: what `auto` wants free; 0: 1 GiB. A run's weights and rows decide it.
        chunk_bytes: payload of one request, under one authentication tag.
        max_inflight_chunks: chunks requested from one owner and not yet received.
        pull_timeout_s: deadline of a pull; longer for a large model.
        stalled_peer_timeout_s: a peer that is silent for so long is dropped.
    """

    bind: str = setting("auto", "IP address, interface, network (10.1.0.0/16), or 0.0.0.0: all")
    encrypt: bool = setting(
        False, "payload too; everything is authenticated and headers of RPC encrypted"
    )
    shared_memory: str = setting(AUTO, "auto (/dev/shm if it is large enough), off, or a folder")
    shared_memory_bytes: int = in_code(0)
    chunk_bytes: int = in_code(4 << 20)
    max_inflight_chunks: int = in_code(4)
    call_timeout_s: float = setting(
        600.0, "deadline of a call: a training step, or embedded generation's start", gt=0
    )
    write_timeout_s: float = setting(
        3600.0, "deadline of what waits for the run's disk, or reads the model", gt=0
    )
    pull_timeout_s: float = in_code(300.0)
    stalled_peer_timeout_s: float = in_code(30.0)

    def __post_init__(self) -> None:
        if self.shared_memory == "False":  # what YAML makes of off
            self.shared_memory = "off"
