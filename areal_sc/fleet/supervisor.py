"""The supervisor: what becomes of processes that are lost. Events in, actions out.

                    Served           Missed
    ┌──► starting ──────────► ready ────────► suspect
    │        │                  │ ▲   Heard      │ │
    │        │                  │ └──────────────┘ │
    │        │ Lost             ▼ Lost             ▼ Lost
    │        │ StartFailed      │                  │
    │        └──────────────────┴──► restarting, given up
    │                                    │
    └───────── Started ◄── driver ◄── Restart

A *unit* is what is started again together: a rollout worker; all ranks of a model, which are of no
use without each other; the agent of a node. An event names a life of its member, by its
incarnation: what is still told of an earlier one changes nothing.

suspect      some heartbeats are missing: it gets no new work, and what it does goes on
lost         too many of them are missing, or the process has ended. That life is over, even if its
             process should go on: whoever drives the restart kills it first
given up     Deaths are counted until the unit does something useful, a row or a step. A unit that
             only dies is given up, and the run ends with the cause of its last death

The first restart begins at once, each further one in a row after a longer pause. What a unit does
before it serves is not counted as useful: else one that always dies at the same step of a replay
would be started for ever.

Pure state: nothing here waits, reads a clock or talks to anybody. `Recovery` drives the units of
workers, `NodeAgent` drives an agent.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from areal_sc.errors import WorkerError

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0
_MAX_DOUBLINGS: Final = 32
"""More than it takes to reach the longest pause; a float holds 2 to this power."""


class UnitState(StrEnum):
    starting = "starting"
    ready = "ready"
    suspect = "suspect"
    restarting = "restarting"
    given_up = "given up"


@dataclass(frozen=True)
class Started:
    """The processes of a unit serve: these lives of its members."""

    unit: str
    incarnations: frozenset[str]


@dataclass(frozen=True)
class UnitServes:
    """A unit does its work, or does it again."""

    unit: str


@dataclass(frozen=True)
class Missed:
    """A life of a member has given no sign of life for a while."""

    incarnation: str


@dataclass(frozen=True)
class Heard:
    """A life of a member that was silent is heard again."""

    incarnation: str


@dataclass(frozen=True)
class Lost:
    """A life of a member has ended, or must be taken for dead.

    Attributes:
        incarnation: of that life.
    """

    incarnation: str
    cause: WorkerError


@dataclass(frozen=True)
class StartFailed:
    """A unit that was being started does not come up.

    Attributes:
        is_final: another attempt is of no use.
    """

    unit: str
    cause: WorkerError
    is_final: bool = False


@dataclass(frozen=True)
class Progressed:
    """A unit has done something useful."""

    unit: str


Event = Started | UnitServes | Missed | Heard | Lost | StartFailed | Progressed


@dataclass(frozen=True)
class RestartUnit:
    """Fence what is left of the unit's members, and start new lives of all of them.

    Attributes:
        after_s: pause before that.
    """

    unit: str
    after_s: float


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on.

    Attributes:
        cause: of the last death.
        num_deaths: in a row.
    """

    unit: str
    cause: WorkerError
    num_deaths: int


Action = RestartUnit | GiveUp

_WORKING: Final = (UnitState.ready, UnitState.suspect)


@dataclass
class _Unit:
    name: str
    state: UnitState = UnitState.starting
    incarnations: frozenset[str] = frozenset()
    silent: set[str] = field(default_factory=set)  # of these
    num_deaths: int = 0  # in a row

    def serve(self) -> None:
        self.state = UnitState.suspect if self.silent else UnitState.ready


class Supervisor:
    """Decides about the units of one role.

    Args:
        max_deaths: of one unit in a row, without anything useful in between; the next one ends the
            run. 0: the first one does.

    Attributes:
        num_restarts: that were decided on so far.
    """

    def __init__(self, units: Iterable[str], max_deaths: int) -> None:
        self.num_restarts = 0
        self._max_deaths = max_deaths
        self._units = {name: _Unit(name) for name in units}

    @property
    def states(self) -> Mapping[str, UnitState]:
        """The state of each unit."""
        return {name: unit.state for name, unit in self._units.items()}

    def state(self, unit: str) -> UnitState:
        """The state of one unit."""
        return self._units[unit].state

    def add(self, unit: str) -> None:
        """A further unit, which is being started."""
        self._units[unit] = _Unit(unit)

    def remove(self, unit: str) -> None:
        """Nothing that is still told of it changes anything."""
        del self._units[unit]

    def on(self, event: Event) -> Action | None:
        """What is to be done about an event; None: nothing."""
        unit_named = getattr(event, "unit", "")
        if unit_named and unit_named not in self._units:
            return None
        match event:
            case Started(name, incarnations):
                unit = self._units[name]
                if unit.state is not UnitState.given_up:
                    unit.state, unit.incarnations = UnitState.starting, incarnations
                    unit.silent.clear()
            case UnitServes(name):
                unit = self._units[name]
                if unit.state is UnitState.starting:
                    unit.serve()
            case Missed(incarnation) | Heard(incarnation):
                self._hear(incarnation, is_silent=isinstance(event, Missed))
            case Progressed(name):
                unit = self._units[name]
                if unit.state in _WORKING:
                    unit.num_deaths = 0
            case Lost(incarnation, cause):
                lost = self._unit_of(incarnation)
                return None if lost is None else self._lose(lost, cause)
            case StartFailed(name, cause, is_final):
                unit = self._units[name]
                if unit.state not in (*_WORKING, UnitState.given_up):
                    return self._lose(unit, cause, is_final=is_final)
        return None

    def _unit_of(self, incarnation: str) -> _Unit | None:
        return next((u for u in self._units.values() if incarnation in u.incarnations), None)

    def _hear(self, incarnation: str, *, is_silent: bool) -> None:
        unit = self._unit_of(incarnation)
        if unit is not None:
            (unit.silent.add if is_silent else unit.silent.discard)(incarnation)
            if unit.state in _WORKING:
                unit.serve()

    def _lose(self, unit: _Unit, cause: WorkerError, *, is_final: bool = False) -> Action:
        unit.incarnations = frozenset()  # the other members' ends are of no interest
        unit.silent.clear()
        unit.num_deaths += 1
        if is_final or unit.num_deaths > self._max_deaths:
            unit.state = UnitState.given_up
            return GiveUp(unit.name, cause, unit.num_deaths)
        unit.state = UnitState.restarting
        self.num_restarts += 1
        if unit.num_deaths == 1:
            return RestartUnit(unit.name, 0.0)
        num_doublings = min(unit.num_deaths - 2, _MAX_DOUBLINGS)
        return RestartUnit(unit.name, min(FIRST_PAUSE_S * 2.0**num_doublings, LONGEST_PAUSE_S))
