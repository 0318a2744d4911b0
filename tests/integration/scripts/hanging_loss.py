"""A loss, and a disk, that hang in one rank, for tests of what happens then."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from areal_sc.algorithms.losses import LossTokens
from areal_sc.algorithms.policy_gradient import policy_gradient
from areal_sc.engines.training import background

MARKER = "AREAL_TEST_HANGS"
"""Names a file that says which rank hangs: at `loss 1`, say, or `disk 0`."""
_sync_folder = background.sync_folder


def hang_once(where: str) -> None:
    """Returns never if the marker says so, which is gone then."""
    if MARKER not in os.environ:  # of another test, in a process that has imported this
        return
    marker, rank = Path(os.environ[MARKER]), dist.get_rank() if dist.is_initialized() else 0
    if marker.exists() and marker.read_text() == f"{where} {rank}":
        marker.unlink()
        while True:
            time.sleep(1000)


def hanging_sync(folder: Path) -> None:
    hang_once("disk")
    _sync_folder(folder)


background.sync_folder = hanging_sync


def hanging_loss(tokens: LossTokens) -> Any:
    """That of PPO, if it does not hang."""
    hang_once("loss")
    return policy_gradient(tokens, clip_low=0.2, clip_high=0.2)
