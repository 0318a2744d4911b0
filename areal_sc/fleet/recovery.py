"""Recovery: does what the lives of the workers of one role ask for.

    Fleet ── what it sees ──► Lives ── StartUnit ──► kill, pause, new lives, bring_up ──► Serves
                                └───── events ─────► the controller

consumes     what `Fleet` and the controller tell; each unit's start is one task
waits for    the agents of the nodes, and `bring_up`: what the controller does with new processes
unblocked by their replies, each bounded by its call's deadline; a further loss of the unit, which
             ends the start that goes on and begins the next one

Whatever is left of a lost unit is killed before anything else: one that was stopped for long, and
goes on, changes nothing any more. The others of a model's ranks wait for the dead one in vain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from areal_sc.errors import (
    ArealError,
    CrashLoop,
    NodeLost,
    StaleTerm,
    WorkerError,
    WorkerLost,
)
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.runtime import Runtime
from areal_sc.fleet.worker_life import (
    EndRun,
    EndStart,
    FleetEvent,
    LifeEvent,
    LifeState,
    Output,
    RunFailed,
    Serves,
    StartFailed,
    StartUnit,
    UnitEvent,
    UnitLeft,
    UnitLost,
    UnitServes,
    Wished,
)
from areal_sc.run.run_status import Restart as RestartStatus
from areal_sc.schedulers.base import Scheduler
from areal_sc.system import telling
from areal_sc.system.waiting import cancel_all

logger = logging.getLogger(__name__)

BringUp = Callable[[str], Awaitable[None]]
"""Makes new processes of a unit do their work; is cancelled when one of them dies."""


class Recovery:
    """Starts lost units of one role again.

    Args:
        hear: takes what becomes of the units.
        unit: see `Lives`.

    Attributes:
        fleet: the workers.
        listeners: take the same, and may fail.
        newest_outage: the last loss, and when it was made good.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runtime: Runtime,
        hear: Callable[[FleetEvent], None],
        unit: str = "",
    ) -> None:
        self.fleet = Fleet(scheduler, runtime, self.tell, unit)
        self.listeners: list[Callable[[FleetEvent], None]] = []
        self.newest_outage: RestartStatus | None = None
        self._hear = hear
        self._bring_up: BringUp | None = None
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: WorkerError | None = None

    @property
    def num_restarts(self) -> int:
        return self.fleet.lives.num_restarts

    def begin(self, bring_up: BringUp) -> None:
        """The first start is over: from now on lost units are started again."""
        self._bring_up, self.newest_outage = bring_up, None
        if not self.fleet.lives.has_failed:
            self._failure = None  # that of an earlier start
        self._follow(self.fleet.lives.begin())

    def tell(self, event: LifeEvent | Wished) -> None:
        """Does at once what follows from an event."""
        if isinstance(event, Wished):
            self.announce(event)
        else:
            self._follow(self.fleet.lives.on(event))

    def announce(self, event: FleetEvent) -> None:
        """The controller hears of an event, and then whoever follows the run."""
        self._hear(event)
        for listener in tuple(self.listeners):  # others may come meanwhile
            telling.tell(listener, event)

    def _follow(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            match output:
                case StartUnit(unit, after_s):
                    self._begin_start(unit, after_s)
                case EndStart(unit):
                    self._end_start(unit)
                case EndRun():
                    self._fail(_last_death(output))
                case UnitEvent():
                    self._note_outage(output)
                    self.announce(output)
                    self._wake()

    async def wait_until_ready(self, member: Member) -> None:
        """Returns when the unit of this worker does its work.

        Raises: WorkerError: a unit was given up.
        """
        while not member.life.is_ready:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def wait_until_left(self, unit: str) -> None:
        """Returns when no process of a unit that was dismissed is being started any more."""
        if (start := self._starts.pop(unit, None)) is not None:
            await asyncio.wait([start])

    async def close(self) -> None:
        """Ends the starts that go on; none begins any more."""
        self._bring_up = None
        await cancel_all(self._starts.values())

    def _begin_start(self, unit: str, after_s: float) -> None:
        if self._bring_up is None:
            return
        self._end_start(unit)
        start = self._start(unit, after_s, self._bring_up, self._starts.get(unit))
        self._starts[unit] = asyncio.create_task(start, name=f"restart of {unit}")

    def _end_start(self, unit: str) -> None:
        if (start := self._starts.get(unit)) is not None:
            start.cancel()

    def _note_outage(self, event: UnitEvent) -> None:
        match event:
            case UnitLost(unit, cause, is_news=True):
                said = str(cause).partition("\n")[0]
                self.newest_outage = RestartStatus(unit, said, time.time())
            case UnitServes(unit) | UnitLeft(unit):
                outage = self.newest_outage
                if outage is not None and outage.unit == unit and outage.ended is None:
                    outage.ended = time.time()

    def _fail(self, cause: WorkerError) -> None:
        if self._failure is None:
            logger.error("the run cannot go on: %s", cause)
            self._failure = cause
            self.announce(RunFailed(cause))
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _start(
        self, unit: str, after_s: float, bring_up: BringUp, earlier: asyncio.Task[None] | None
    ) -> None:
        members = [member for member in self.fleet.members if member.life.unit == unit]
        had_life = any(member.has_lived for member in members)
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            if had_life:
                await self.fleet.kill(members)
            await asyncio.sleep(after_s)
            if had_life:
                logger.warning("unit=%s is started again", unit)
            # nothing of it is there yet
            await self.fleet.wait_for_nodes(members, are_lost=had_life)
            await self.fleet.restart(members)
            for member in members:
                if member.life.state is LifeState.left:
                    return
                if member.failure is not None:  # its news was faster
                    raise member.failure
            await bring_up(unit)
        except WorkerError as error:
            self.tell(StartFailed(unit, error, is_final=isinstance(error, NodeLost)))
        except ArealError as error:
            setting = "transport.call_timeout_s, of a start transport.write_timeout_s"
            if await self.fleet.lose_hung(error, members, setting):
                return  # its loss begins the next restart
            lost = WorkerLost(f"{unit} could not be started again: {error}")
            lost.__cause__ = error
            self.tell(StartFailed(unit, lost, is_final=isinstance(error, StaleTerm)))
        except Exception as error:  # the task's end: whoever waits for the unit hears of it
            logger.exception("the restart of %s failed", unit)
            lost = WorkerLost(f"{unit} could not be started again: {error!r}")
            lost.__cause__ = error
            self.tell(StartFailed(unit, lost, is_final=True))
        else:
            self.tell(Serves(unit))


def _last_death(end: EndRun) -> WorkerError:
    """Why the run ends, with the last lines of the log."""
    is_alone = isinstance(end.cause, NodeLost) or isinstance(end.cause.__cause__, StaleTerm)
    if end.num_deaths == 1 or is_alone:
        return end.cause
    last = CrashLoop(
        f"{end.unit} died {end.num_deaths} times in a row without finishing anything; the last "
        f"time: {end.cause}",
        log_path=end.cause.log_path,
        log_tail=end.cause.log_tail,
    )
    last.__cause__ = end.cause
    return last
