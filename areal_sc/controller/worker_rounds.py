"""What is begun at every rollout worker, spread over turns of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from areal_sc.controller.background import Background

BEGUN_PER_TURN: Final = 32
"""Workers with which something is begun without giving the event loop a turn: some milliseconds."""

W = TypeVar("W")


class WorkerRounds(Generic[W]):
    """Rounds over all workers. One that is asked for during another one follows it.

    Args:
        name: of the rounds' task.
        begin_at: begins it at one worker, unless there is nothing to begin; tells whether it did.
    """

    def __init__(self, background: Background, name: str, begin_at: Callable[[W], bool]) -> None:
        self._background = background
        self._name = name
        self._begin_at = begin_at
        self._is_wanted = False
        self._task: asyncio.Task[None] | None = None

    @property
    def is_going_on(self) -> bool:
        return self._task is not None and not self._task.done()

    def begin(self, workers: Sequence[W]) -> None:
        self._is_wanted = True
        if not self.is_going_on:
            self._task = asyncio.create_task(
                self._background.guard(self._run(workers)), name=self._name
            )

    async def close(self) -> None:
        """Nothing more is begun."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, workers: Sequence[W]) -> None:
        num_begun = 0
        while self._is_wanted:
            self._is_wanted = False
            for worker in workers:
                num_begun += self._begin_at(worker)
                if num_begun == BEGUN_PER_TURN:
                    num_begun = 0
                    await asyncio.sleep(0)
