"""Snapshots: what a run needs to go on after its process has ended.

    checkpoints/step-<n>/engine/             weights, optimizer, schedule, RNG of every rank
    checkpoints/step-<n>/controllers.msgpack policy version, ledger, place in the prompt stream

A snapshot is written under another name and gets its own once everything is on disk, so one that
has its name is whole. Rows that were generated but not trained are not kept: their groups are
generated again.
"""

from __future__ import annotations

import logging
import shutil
from typing import Any

import msgpack

from areal_sc.controller.rollout import RolloutController
from areal_sc.controller.train import TrainController
from areal_sc.errors import CheckpointError, RunFolderError
from areal_sc.run_folder import RunFolder

logger = logging.getLogger(__name__)

CONTROLLERS = "controllers.msgpack"


def save_snapshot(
    folder: RunFolder, actor: TrainController, rollout: RolloutController, keep: int
) -> None:
    """Writes a snapshot of the current policy version; the `keep` newest ones stay.

    Raises: CheckpointError: the disk is full, say; earlier snapshots are left as they were.
    """
    final = folder.snapshot_path(actor.version)
    partial = final.with_name(final.name + ".partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        actor.save_snapshot()
        folder.write_atomic(partial / CONTROLLERS, msgpack.packb(rollout.state()))
        folder.commit_folder(partial, final)
    except (OSError, RunFolderError) as error:
        raise CheckpointError(f"snapshot {final} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for outdated in folder.snapshots()[:-keep]:
        shutil.rmtree(outdated, ignore_errors=True)


def load_latest_snapshot(
    folder: RunFolder, actor: TrainController, rollout: RolloutController
) -> tuple[int, list[str]]:
    """Goes back to the newest snapshot that can be read.

    Returns: its step, and a warning for each newer one that could not be read.
    Raises: CheckpointError: none can be read.
    """
    warnings: list[str] = []
    for path in reversed(folder.snapshots()):
        step = int(path.name.rpartition("-")[2])
        try:
            state: dict[str, Any] = msgpack.unpackb(
                (path / CONTROLLERS).read_bytes(), strict_map_key=False
            )
            actor.load_snapshot(step)
            rollout.restore(state)
            return step, warnings
        except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
            warnings.append(
                f"snapshot {path} cannot be read ({error}); going back to the one before"
            )
            logger.warning(warnings[-1])
    raise CheckpointError(
        f"no snapshot in {folder.checkpoints} can be read: " + "; ".join(warnings)
    )
