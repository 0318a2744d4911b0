"""What the controllers of one run share: the cards that training and generation use in turns.

consumes     what controllers want of either side
waits for    the other side to give its memory up, in its own code
unblocked by its last worker that has done so, or whose process is gone; and by a failure, or the
             workers' end, which everyone who waits raises

    nobody's ──want──► a side's ──the other side wants──► it leaves ──left──► nobody's

Training comes first: what it is asked for is short, and nothing else of the run goes on before it
is done. Generation is interrupted for it, as for new weights, and comes back when training is asked
for nothing, and somebody waits for answers.

Controllers know each other by their scheduler alone, which `common_of` asks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

from areal_sc.errors import WorkerError
from areal_sc.workers.calls import GroupAttempt

if TYPE_CHECKING:
    from areal_sc.run.run_folder import RunFolder
    from areal_sc.schedulers.base import Scheduler


class Side(StrEnum):
    """One of the two that use the memory: all ranks, or the engines of all rollout workers."""

    training = "training"
    generation = "generation"


class Turns:
    """The two sides, and what each of them is wanted for. Pure state: `SharedCard` waits.

    Attributes:
        holder: whose memory may be on the cards; None: nobody's.
        is_leaving: the holder gives its memory up.
        is_idle: training has not been asked for anything for some time.
    """

    def __init__(self) -> None:
        self.holder: Side | None = Side.generation  # an earlier start may have left it there
        self.is_leaving = False
        self.is_idle = False
        self._wants = Counter[Side]()
        self._num_patient = 0

    def want(self, side: Side) -> None:
        """Somebody waits for what the side does, or has begun it; ends with `done`."""
        self._wants[side] += 1
        self.is_idle &= side is not Side.training

    def done(self, side: Side) -> None:
        """One of those who wanted the side does not any more."""
        assert self._wants[side] > 0, f"{side} is done more often than it was wanted"
        self._wants[side] -= 1

    def wait_for_idle(self, change: int) -> None:
        """Generation is wanted by so many more, or fewer, but not between two calls of a step."""
        self._num_patient += change

    def is_wanted(self, side: Side) -> bool:
        return self._wants[side] > 0

    def may_use(self, side: Side) -> bool:
        """Whether the side may take memory, or use what it has."""
        return self.holder is side and not self.is_leaving

    def advance(self) -> Side | None:
        """Gives the turn to who wants it; returns the side that has to leave for that now."""
        wanted = self._next
        if self.is_leaving or wanted in (None, self.holder):
            return None
        if self.holder is None:
            self.holder = wanted
            return None
        self.is_leaving = True
        return self.holder

    def left(self) -> None:
        """Nothing of the holder is on the cards any more."""
        assert self.is_leaving, f"{self.holder} was not asked to leave"
        self.holder, self.is_leaving = None, False

    @property
    def _next(self) -> Side | None:
        """The side that is wanted, training first."""
        if self._wants[Side.training]:
            return Side.training
        may_come = self.is_idle or self.holder is not Side.training
        is_wanted = self._wants[Side.generation] or (self._num_patient and may_come)
        return Side.generation if is_wanted else None


IDLE_S: Final = 1.0
"""Between two calls of a step there is less."""

Leave = Callable[[], Awaitable[None]]
"""Gives up all memory of a side; returns when it is free."""


class SharedCard:
    """Lets one side at a time use the cards; without `share` both may at any time.

    What keeps a side from leaving is final: until `close`, whoever waits for the other side's turn
    raises it, and nobody is asked to leave again.

    Attributes:
        is_shared: they take turns.
    """

    def __init__(self) -> None:
        self.is_shared = False
        self._turns = Turns()
        self._leave: dict[Side, list[Leave]] = {side: [] for side in Side}
        self._enter: dict[Side, list[Callable[[], None]]] = {side: [] for side in Side}
        self._changed = asyncio.Event()
        self._leaving: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._idle_timer: asyncio.TimerHandle | None = None

    def share(self) -> None:
        """From now on they take turns."""
        self.is_shared = True

    def join(self, side: Side, *, enter: Callable[[], None], leave: Leave) -> None:
        """Some of the workers of a side.

        Args:
            enter: is told that they may use their memory.
        """
        self._enter[side].append(enter)
        self._leave[side].append(leave)

    @asynccontextmanager
    async def held(self, side: Side) -> AsyncIterator[None]:
        """Within it the side has its turn; a turn of generation may be interrupted all the same.

        Raises: what has kept the other side from leaving. WorkerError: the workers end.
        """
        with self.wanted(side):
            turns = self._turns
            while self.is_shared and not turns.may_use(side):
                if self._failure is not None:
                    raise self._failure
                await self._changed.wait()
                if turns is not self._turns:
                    raise WorkerError(f"{side} waited for its turn, and the workers were ended")
            yield

    @contextmanager
    def wanted(self, side: Side) -> Iterator[None]:
        """Within it the side gets its turn as soon as the other one can leave."""
        if not self.is_shared:
            yield
            return
        turns = self._turns
        turns.want(side)
        self._advance()
        try:
            yield
        finally:
            turns.done(side)
            if turns is self._turns:  # else all has ended
                self._advance()

    def is_away_from(self, side: Side) -> bool:
        """The other one has the cards, or gets them, and nothing keeps it from giving them back."""
        return self.is_shared and self._failure is None and not self._turns.may_use(side)

    @contextmanager
    def wanted_when_idle(self) -> Iterator[None]:
        """Within it generation gets its turn once training is asked for nothing for `IDLE_S`."""
        if not self.is_shared:
            yield
            return
        turns = self._turns
        turns.wait_for_idle(1)
        self._advance()
        try:
            yield
        finally:
            turns.wait_for_idle(-1)

    async def close(self) -> None:
        """The workers end, and with them who waits for a turn; a later start begins anew."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._turns, self._failure = Turns(), None
        self._notify()

    def _advance(self) -> None:
        before = self._turns.holder
        side = self._turns.advance()
        if side is not None:
            self._leaving = asyncio.create_task(self._give_up(side), name=f"{side} leaves")
        elif self._turns.holder not in (None, before):
            for enter in self._enter[self._turns.holder]:
                enter()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if not self._turns.is_wanted(Side.training) and not self._turns.is_idle:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_S, self._note_idle)
        self._notify()

    def _notify(self) -> None:
        """Everyone who waits looks again."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _note_idle(self) -> None:
        self._turns.is_idle = True
        self._advance()

    async def _give_up(self, side: Side) -> None:
        try:
            await asyncio.gather(*(leave() for leave in self._leave[side]))
        except Exception as error:  # the task's end: whoever waits for the turn raises it
            self._failure = error
        else:
            self._turns.left()
        self._advance()


NeedsRun = Callable[[GroupAttempt], bool]
"""Whether the rows of a run of a group may still be read."""


@dataclass(eq=False)
class Common:
    """Shared by the controllers of a scheduler.

    Attributes:
        needs: each rollout controller adds what it says of rows.
        card: who may use the memory of GPUs that training and generation share.
    """

    needs: set[NeedsRun] = field(default_factory=set)
    card: SharedCard = field(default_factory=SharedCard)
    _lineage: int = 0
    _entered: set[str] = field(default_factory=set)

    def enter_lineage(self, role: str, folder: RunFolder) -> int:
        """Number of the history of weights that a model begins.

        Models that begin one after the other, or go back one after the other, share it; a model
        that is in the newest history already begins the next one.

        Raises: RunFolderError: as `RunFolder.begin_lineage`.
        """
        if not self._lineage or role in self._entered:
            self._lineage = folder.begin_lineage()
            self._entered.clear()
        self._entered.add(role)
        return self._lineage


_of_schedulers: WeakKeyDictionary[Scheduler, Common] = WeakKeyDictionary()


def common_of(scheduler: Scheduler) -> Common:
    return _of_schedulers.setdefault(scheduler, Common())
