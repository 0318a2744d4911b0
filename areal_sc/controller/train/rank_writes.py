"""Snapshots and exports that the ranks write beside training.

    begin    every rank copies its state                  (the caller waits for this)
    finish   it is written, and an export gets its place  (training goes on)

A write that a death interrupts in the step that follows is begun again by the ranks that are
started in place of the dead; in a later step it fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_sc.controller.train.rank_state import Asked
from areal_sc.controller.train.ranks import Ranks
from areal_sc.errors import CheckpointError, StaleCall, WaitTimeout, WorkerLost
from areal_sc.ids import random_id
from areal_sc.system.durable import commit_folder
from areal_sc.system.waiting import bounded
from areal_sc.workers import rank_methods
from areal_sc.workers.operations import Kind, Operation, digest

Finish = Callable[[], Coroutine[Any, Any, None]]


@dataclass(eq=False)
class RankWrites:
    """Writes of the ranks of one model."""

    ranks: Ranks

    async def snapshot(self) -> Finish:
        """Returns when every rank has copied its state; the rest is written by what it returns."""
        _, finish = await self._begin(self.ranks.operation(Kind.snapshot))
        return finish

    async def export(self, target: Path) -> Finish:
        """Begins an export like `snapshot`; replaces `target`, maybe on another file system."""
        operation = self.ranks.operation(Kind.export, digest(str(target)))
        exported, finish_write = await self._begin(operation)

        async def finish() -> None:
            await finish_write()
            try:
                moved = asyncio.to_thread(commit_folder, Path(exported), target)
                limit_s = self.ranks.fleet.config.transport.write_timeout_s
                await bounded(moved, limit_s, f"the disk of {target}", "transport.write_timeout_s")
            except (OSError, WaitTimeout) as error:
                raise CheckpointError(f"cannot write {target}: {error}") from error

        return finish

    async def _begin(self, operation: Operation) -> tuple[str, Finish]:
        """The folder that is written to, and what waits for the end."""
        ranks, state = self.ranks, self.ranks.state
        shares = [rank_methods.Write(operation, random_id())] * ranks.layout.num_shares
        state.note(write := Asked(rank_methods.BEGIN_WRITE, shares))
        try:
            written: str = (await ranks.ask(write))[0]
        except BaseException:
            state.drop(write)
            raise

        async def finish() -> None:
            wanted = rank_methods.Change(operation)
            try:
                # a write that hangs is not begun again: the disk does not answer
                await ranks.repeated(
                    lambda: ranks.fleet.call_all(rank_methods.FINISH_WRITE, wanted),
                    repeats_hangs=False,
                    needs_card=False,
                )
            except WorkerLost as error:
                raise CheckpointError(f"{operation}: {error}") from error
            except StaleCall as error:
                raise CheckpointError(
                    f"{operation}: train workers died while it was written, in a later step"
                ) from error
            finally:
                state.drop(write)

        return written, finish
