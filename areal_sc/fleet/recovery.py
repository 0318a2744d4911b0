"""Recovery: starts lost workers of one role again, as its supervisor decides.

    Fleet ── loss ──► Supervisor ── Restart ──► kill, pause, new lives, bring_up ──► Served
                          └──────── GiveUp ───► on_given_up: the run ends

consumes     losses and silences, as the fleet tells of them; each unit's restarts are one task
waits for    the agents of the nodes, and `bring_up`: what the controller does with new processes
unblocked by their replies, each bounded by its call's deadline; a further loss of the unit, which
             ends the restart that goes on and begins the next one

Whatever is left of a lost unit is killed before anything else: one that was stopped for long, and
goes on, changes nothing any more. The others of a model's ranks wait for the dead one in vain.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence

from areal_sc.errors import (
    ArealError,
    CrashLoop,
    NodeLost,
    RpcTimeout,
    StaleTerm,
    WorkerError,
    WorkerLost,
)
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.fleet.supervisor import (
    Event,
    GiveUp,
    Heard,
    Lost,
    Missed,
    Progressed,
    RestartUnit,
    Started,
    StartFailed,
    Supervisor,
    UnitServes,
    UnitState,
)
from areal_sc.run.run_status import Restart as RestartStatus
from areal_sc.system.telling import tell

logger = logging.getLogger(__name__)

OnOutage = Callable[[str, WorkerError | None], None]
"""Told that a unit is lost, and why, and is being started again; None: it does its work again."""


class Recovery:
    """Drives the supervisor of one role.

    Args:
        units: what is started again together, by name.
        max_deaths: as `Supervisor`.
        bring_up: makes new processes of a unit do their work; is cancelled when one of them dies.
        on_given_up: is told once why the run cannot go on.
        on_change: is called after each change of a unit's state.

    Attributes:
        on_outage: see `OnOutage`.
        newest_outage: the last loss, and when it was made good.
    """

    on_outage: OnOutage

    def __init__(
        self,
        fleet: Fleet,
        units: Mapping[str, Sequence[Member]],
        max_deaths: int,
        bring_up: Callable[[Sequence[Member]], Awaitable[None]],
        on_given_up: Callable[[WorkerError], None],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._fleet = fleet
        self._units = dict(units)
        self._unit_of = {member.name: unit for unit, members in units.items() for member in members}
        self._supervisor = Supervisor(units, max_deaths)
        self._bring_up = bring_up
        self._on_given_up = on_given_up
        self._on_change = on_change
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: WorkerError | None = None
        self._is_closed = False
        self._down: set[str] = set()
        self._launching: set[str] = set()
        self._dismissed: set[str] = set()
        self._num_restarts_of = Counter[str]()
        self.newest_outage: RestartStatus | None = None
        self.on_outage = lambda unit, cause: None
        fleet.on_silence = self._note_silence
        for unit, members in units.items():
            self._tell(Started(unit, _incarnations(members)))
            self._tell(UnitServes(unit))

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    def is_ready(self, member: Member) -> bool:
        """Whether the unit of this worker does its work, and gives signs of life."""
        return self.state(member) is UnitState.ready

    def state(self, member: Member) -> UnitState:
        """The state of the unit of this worker; `starting` where the worker is dismissed."""
        unit = self._unit_of.get(member.name)
        return UnitState.starting if unit is None else self._supervisor.state(unit)

    def num_restarts_with(self, member: Member) -> int:
        """Restarts of the unit of this worker."""
        return self._num_restarts_of[self._unit_of.get(member.name, "")]

    def note_loss(self, member: Member, cause: WorkerError) -> None:
        """The newest life of a worker is lost, or of no use any more."""
        self._tell(Lost(member.worker.incarnation, cause))

    def note_progress(self, member: Member) -> None:
        """The worker has done something useful: a row, or a step."""
        if (unit := self._unit_of.get(member.name)) is not None:
            self._supervisor.on(Progressed(unit))  # changes no state

    async def wait_until_ready(self, member: Member) -> None:
        """Returns when the unit of this worker does its work.

        Raises: WorkerError: a unit was given up.
        """
        while not self.is_ready(member):
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    def add(self, unit: str, members: Sequence[Member]) -> None:
        """Starts a further unit, and from then on starts it again, as those from the beginning."""
        self._units[unit] = members
        self._unit_of |= {member.name: unit for member in members}
        self._supervisor.add(unit)
        start = self._restart(unit, 0.0, self._restarts.get(unit))
        self._restarts[unit] = asyncio.create_task(start, name=f"start of {unit}")

    async def dismiss(self, unit: str) -> None:
        """Nobody starts a unit again; returns when none of its members is being started any more.

        A process that is on its way is waited for: else it would be there without anybody's
        knowledge.
        """
        if self._supervisor.state(unit) is UnitState.given_up:
            return  # the run ends
        self._supervisor.remove(unit)
        for member in self._units.pop(unit):
            del self._unit_of[member.name]
        if unit in self._down:
            self._note_up(unit)
        restart = self._restarts.pop(unit, None)
        if restart is None:
            return
        self._dismissed.add(unit)
        try:
            if unit not in self._launching:
                restart.cancel()
            await asyncio.wait([restart])
        finally:
            self._dismissed.discard(unit)

    async def close(self) -> None:
        """Ends the restarts that go on; none begins any more."""
        self._is_closed = True
        restarts = list(self._restarts.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)

    def _note_silence(self, member: Member) -> None:
        incarnation = member.worker.incarnation
        self._tell(Missed(incarnation) if member.is_silent else Heard(incarnation))

    def _tell(self, event: Event) -> None:
        before = self._supervisor.states
        action = self._supervisor.on(event)
        match action:
            case RestartUnit(unit, after_s) if not self._is_closed and self._failure is None:
                self._restart_later(unit, after_s)
            case GiveUp() as end:
                self._give_up(_last_death(end))
        if self._supervisor.states != before:
            self._note_change()
        match event:
            case UnitServes(unit) if unit in self._down:
                self._note_up(unit)
            case Lost(_, cause) | StartFailed(_, cause) if isinstance(action, RestartUnit):
                if action.unit not in self._down:
                    self._down.add(action.unit)
                    said = str(cause).partition("\n")[0]
                    self.newest_outage = RestartStatus(action.unit, said, time.time())
                    tell(self.on_outage, action.unit, cause)

    def _note_up(self, unit: str) -> None:
        self._down.discard(unit)
        if self.newest_outage is not None and self.newest_outage.unit == unit:
            self.newest_outage.ended = time.time()
        tell(self.on_outage, unit, None)

    def _restart_later(self, unit: str, after_s: float) -> None:
        self._num_restarts_of[unit] += 1
        earlier = self._restarts.get(unit)
        if earlier is not None:
            earlier.cancel()
        restart = self._restart(unit, after_s, earlier)
        self._restarts[unit] = asyncio.create_task(restart, name=f"restart of {unit}")

    def _give_up(self, cause: WorkerError) -> None:
        if self._failure is None:
            logger.error("the run cannot go on: %s", cause)
            self._failure = cause
            self._on_given_up(cause)
            self._note_change()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._on_change()

    async def _restart(self, unit: str, after_s: float, earlier: asyncio.Task[None] | None) -> None:
        members = self._units.get(unit, ())
        had_life = any(member.worker.incarnation for member in members)
        try:
            if earlier is not None:
                await asyncio.wait([earlier])
            if had_life:
                await self._fleet.kill(members)
            await asyncio.sleep(after_s)
            if had_life:
                logger.warning("unit=%s is started again", unit)
            # nothing of it is there yet
            await self._fleet.wait_for_nodes(members, are_lost=had_life)
            self._launching.add(unit)
            try:
                await self._fleet.restart(members)
            finally:
                self._launching.discard(unit)
            if unit in self._dismissed:
                return
            self._tell(Started(unit, _incarnations(members)))
            for member in members:
                if member.failure is not None:  # its news was faster
                    raise member.failure
            await self._bring_up(members)
        except WorkerError as error:
            self._tell(StartFailed(unit, error, is_final=isinstance(error, NodeLost)))
        except ArealError as error:
            if isinstance(error, RpcTimeout) and self._unit_of.get(error.silent) == unit:
                await self._fleet.lose_hung(
                    error, members, "transport.call_timeout_s, of a start transport.write_timeout_s"
                )
                return  # its loss begins the next restart
            lost = WorkerLost(f"{unit} could not be started again: {error}")
            lost.__cause__ = error
            self._tell(StartFailed(unit, lost, is_final=isinstance(error, StaleTerm)))
        except Exception as error:  # the task's end: whoever waits for the unit hears of it
            logger.exception("the restart of %s failed", unit)
            lost = WorkerLost(f"{unit} could not be started again: {error!r}")
            lost.__cause__ = error
            self._tell(StartFailed(unit, lost, is_final=True))
        else:
            self._tell(UnitServes(unit))


def _incarnations(members: Sequence[Member]) -> frozenset[str]:
    return frozenset(member.worker.incarnation for member in members)


def _last_death(end: GiveUp) -> WorkerError:
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
