"""What the ranks write while they train on: snapshots, and models in Hugging Face layout.

A write is begun, which takes until every rank has copied its state to host memory. What is returned
finishes it, which takes until all of it is on the disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from areal_sc.controller.fleet import Fleet
from areal_sc.durable import commit_folder
from areal_sc.errors import CheckpointError
from areal_sc.workers.calls import BEGIN_SAVE_HF, BEGIN_SNAPSHOT, FINISH_WRITE, Change
from areal_sc.workers.operations import Operation

Finish = Callable[[], Coroutine[Any, Any, None]]


class RankWrites:
    """The writes of one TrainController.

    Args:
        exports: folder in which these ranks gather models before they get their place.
    """

    def __init__(self, fleet: Fleet, exports: Path) -> None:
        self._fleet = fleet
        self._exports = exports

    def clear(self) -> None:
        """Deletes what an earlier start did not finish."""
        shutil.rmtree(self._exports, ignore_errors=True)

    def close(self) -> None:
        with suppress(OSError):  # it is not there, or an export is still being copied from it
            self._exports.rmdir()
            self._exports.parent.rmdir()

    async def begin_snapshot(self, operation: Operation) -> Finish:
        await self._fleet.call_all(BEGIN_SNAPSHOT, Change(operation))
        return partial(self._finish, operation)

    async def begin_export(self, operation: Operation, target: Path) -> Finish:
        """Replaces the folder `target`, which may be on another file system."""
        replies = await self._fleet.call_all(BEGIN_SAVE_HF, Change(operation))
        return partial(self._finish_export, operation, Path(replies[0]), target)

    async def _finish(self, operation: Operation) -> None:
        await self._fleet.call_all(FINISH_WRITE, Change(operation))

    async def _finish_export(self, operation: Operation, exported: Path, target: Path) -> None:
        await self._finish(operation)
        try:
            await asyncio.to_thread(commit_folder, exported, target)
        except OSError as error:
            raise CheckpointError(f"cannot write {target}: {error}") from error
