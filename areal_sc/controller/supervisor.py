"""The supervisor: what becomes of workers that are lost. Events in, actions out.

                    Served                  Lost
    ┌──► starting ───────────► ready ──────────────┐
    │        │  Lost, StartFailed                  ▼
    │        └───────────────────────────► restarting, given up
    │                                              │
    └────────── Started ◄── driver ◄── Restart ────┘

A *unit* is what is started again together: a rollout worker, or all ranks of a model, which are of
no use without each other. An event names a life of its member, by its incarnation: what is still
told of an earlier one changes nothing.

Deaths are counted until the unit does something useful, a row or a step: a unit that only dies is
given up, and the run ends with the cause of its last death. The first restart begins at once, each
further one in a row after a longer pause.

Pure state: nothing here waits, reads a clock or talks to anybody. `Recovery` drives it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from areal_sc.errors import WorkerError

FIRST_PAUSE_S: Final = 0.5
LONGEST_PAUSE_S: Final = 30.0


class UnitState(StrEnum):
    starting = "starting"
    ready = "ready"
    restarting = "restarting"
    given_up = "given up"


@dataclass(frozen=True)
class Started:
    """The processes of a unit serve: these lives of its members."""

    unit: str
    incarnations: frozenset[str]


@dataclass(frozen=True)
class Served:
    """A unit does its work, or does it again."""

    unit: str


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
    """A unit that was being started does not come up."""

    unit: str
    cause: WorkerError


@dataclass(frozen=True)
class Progressed:
    """A unit has done something useful."""

    unit: str


Event = Started | Served | Lost | StartFailed | Progressed


@dataclass(frozen=True)
class Restart:
    """Fence what is left of the unit's members, and start new lives of all of them.

    Attributes:
        after_s: pause before that.
    """

    unit: str
    after_s: float


@dataclass(frozen=True)
class GiveUp:
    """The run cannot go on."""

    unit: str
    cause: WorkerError


Action = Restart | GiveUp


@dataclass
class _Unit:
    name: str
    state: UnitState = UnitState.starting
    incarnations: frozenset[str] = frozenset()
    num_deaths: int = 0  # in a row


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
        """Of each unit."""
        return {name: unit.state for name, unit in self._units.items()}

    def on(self, event: Event) -> Action | None:
        """What is to be done about an event; None: nothing."""
        match event:
            case Started(name, incarnations):
                unit = self._units[name]
                if unit.state is not UnitState.given_up:
                    unit.state, unit.incarnations = UnitState.starting, incarnations
            case Served(name):
                unit = self._units[name]
                if unit.state is UnitState.starting:
                    unit.state = UnitState.ready
            case Progressed(name):
                self._units[name].num_deaths = 0
            case Lost(incarnation, cause):
                for unit in self._units.values():
                    if incarnation in unit.incarnations:
                        return self._lose(unit, cause)
            case StartFailed(name, cause):
                return self._lose(self._units[name], cause)
        return None

    def _lose(self, unit: _Unit, cause: WorkerError) -> Action | None:
        unit.incarnations = frozenset()  # the other members' ends are of no interest
        unit.num_deaths += 1
        if unit.num_deaths > self._max_deaths:
            unit.state = UnitState.given_up
            return GiveUp(unit.name, cause)
        unit.state = UnitState.restarting
        self.num_restarts += 1
        num_pauses = unit.num_deaths - 2
        pause_s = FIRST_PAUSE_S * 2.0**num_pauses if num_pauses >= 0 else 0.0
        return Restart(unit.name, min(pause_s, LONGEST_PAUSE_S))
