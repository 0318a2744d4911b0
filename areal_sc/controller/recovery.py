"""Recovery: starts lost workers of one role again, as its supervisor decides.

    Fleet ── loss ──► Supervisor ── Restart ──► pause, fence, new lives, bring_up ──► Served
                          └──────── GiveUp ───► on_given_up: the run ends

consumes     losses, as the fleet tells of them; each unit's restarts are one task
waits for    the agents of the nodes, and `bring_up`: what the controller does with new processes
unblocked by their replies, each bounded by its call's deadline; a further loss of the unit, which
             ends the restart that goes on and begins the next one
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence

from areal_sc.controller.fleet import Fleet
from areal_sc.controller.node_workers import Member
from areal_sc.controller.supervisor import (
    Event,
    GiveUp,
    Lost,
    Progressed,
    Restart,
    Served,
    Started,
    StartFailed,
    Supervisor,
    UnitState,
)
from areal_sc.errors import ArealError, StepsLost, WorkerError, WorkerLost

logger = logging.getLogger(__name__)


class Recovery:
    """Drives the supervisor of one role.

    Args:
        units: what is started again together, by name.
        max_deaths: as `Supervisor`.
        bring_up: makes new processes of a unit do their work; is cancelled when one of them dies.
        on_given_up: is told why the run cannot go on.
    """

    def __init__(
        self,
        fleet: Fleet,
        units: Mapping[str, Sequence[Member]],
        max_deaths: int,
        bring_up: Callable[[Sequence[Member]], Awaitable[None]],
        on_given_up: Callable[[WorkerError], None],
    ) -> None:
        self._fleet = fleet
        self._units = units
        self._unit_of = {member.name: unit for unit, members in units.items() for member in members}
        self._supervisor = Supervisor(units, max_deaths)
        self._bring_up = bring_up
        self._on_given_up = on_given_up
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._failure: WorkerError | None = None
        for unit, members in units.items():
            self._tell(Started(unit, _incarnations(members)))
            self._tell(Served(unit))

    @property
    def num_restarts(self) -> int:
        return self._supervisor.num_restarts

    def is_ready(self, member: Member) -> bool:
        """Whether the unit of this worker does its work."""
        return self._supervisor.states[self._unit_of[member.name]] is UnitState.ready

    def note_loss(self, member: Member, cause: WorkerError) -> None:
        """The newest life of a worker is lost, or of no use any more: it is fenced by then."""
        self._tell(Lost(member.worker.incarnation, cause))

    def note_progress(self, member: Member) -> None:
        """The worker has done something useful: a row, or a step."""
        self._tell(Progressed(self._unit_of[member.name]))

    async def wait_until_ready(self, member: Member) -> None:
        """Returns when the unit of this worker does its work.

        Raises: WorkerError: it was given up.
        """
        while not self.is_ready(member):
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def close(self) -> None:
        """Ends the restarts that go on."""
        restarts = list(self._restarts.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)

    def _tell(self, event: Event) -> None:
        match self._supervisor.on(event):
            case Restart(unit, after_s):
                if unit in self._restarts:
                    self._restarts[unit].cancel()
                name = f"restart of {unit}"
                self._restarts[unit] = asyncio.create_task(self._restart(unit, after_s), name=name)
            case GiveUp(unit, cause):
                logger.error("unit=%s is given up: %s", unit, cause)
                self._fail(cause)
        self._changed.set()
        self._changed = asyncio.Event()

    def _fail(self, cause: WorkerError) -> None:
        self._failure = cause
        self._on_given_up(cause)
        self._changed.set()

    async def _restart(self, unit: str, after_s: float) -> None:
        members = self._units[unit]
        await asyncio.sleep(after_s)
        logger.warning("unit=%s is started again", unit)
        try:
            await self._fleet.restart(members)
            self._tell(Started(unit, _incarnations(members)))
            for member in members:
                if member.failure is not None:  # its news was faster
                    raise member.failure
            await self._bring_up(members)
        except StepsLost as error:  # no further start would help
            self._fail(error)
        except WorkerError as error:
            self._tell(StartFailed(unit, error))
        except ArealError as error:
            lost = WorkerLost(f"{unit} could not be started again: {error}")
            lost.__cause__ = error
            self._tell(StartFailed(unit, lost))
        except Exception as error:  # the task's end: whoever waits for the unit hears of it
            logger.exception("the restart of %s failed", unit)
            lost = WorkerLost(f"{unit} could not be started again: {error!r}")
            lost.__cause__ = error
            self._fail(lost)
        else:
            self._tell(Served(unit))


def _incarnations(members: Sequence[Member]) -> frozenset[str]:
    return frozenset(member.worker.incarnation for member in members)
