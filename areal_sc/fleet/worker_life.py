"""A worker's life as a state machine: events in, instructions out.

Nothing here waits, reads a clock or talks to anybody. `NodeWorkers` and `Fleet` tell what they see,
`Recovery` does what is decided, and controllers read states.

A *unit* is what is started together: a rollout worker, or all ranks of a model, which are of no use
without each other.

    state      what holds                              ends by ──► next state
    ─────────  ──────────────────────────────────────  ──────────────────────────────────────────
    coming     it has had no process yet               Joined ──► starting
                                                       Launching ──► launching
    launching  its processes are being started, which  Started ──► starting
               can be awaited, and not be undone
    starting   its processes serve calls; its          Built ──► built     Serves ──► serving
               controller brings it up                 Launching ──► launching
    built      its engine can be called; it gets the   Serves ──► serving
               newest weights
    serving    it does its work                        Missed ──► silent
    silent     heartbeats are missing: it gets no new  Heard, of all that were silent ──► serving
               work, and what it does goes on
    lost       a process of it is dead, or taken for   Launching ──► launching
               dead: all of it is started again
    given up   it died too often, and ends the run     (nothing)
    left       nobody wants it any more                (nothing)

    any of the first six ── Died, StartFailed ──► lost, or given up
    any but given up     ── Dismissed ──► left

Beside that, a unit stays, drains or is closed: one that drains is to leave, and one that is closed
gets no more work. It is started again all the same as long as it has not left.

An event names a life of a worker by its incarnation: what is told of an earlier life changes
nothing. What still goes on of a life that is taken for dead does not count: `Recovery` kills it
before the next one.

Deaths are counted until the unit does something useful, a row or a step. What it does before it
serves is not useful: else one that always dies at the same step of a replay would be started for
ever. The first restart begins at once, each further one in a row after a longer pause.

Before `Lives.begin` nothing is restarted: a new worker that dies ends the start, and one of an
earlier start of the script is restarted then.

A controller hears `FleetEvent`s. It has one function, `_hear`, that says who of it acts on what;
whoever follows a run listens to the same events (`Controller.heard_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from areal_sc.errors import RunFolderError, WorkerError
from areal_sc.nodes.spec import Wish, WorkerOrder
from areal_sc.run.run_status import PauseWish
from areal_sc.system.deaths import Deaths


@dataclass(frozen=True)
class UnitEvent:
    """What has become of a unit."""

    unit: str


@dataclass(frozen=True)
class UnitLost(UnitEvent):
    """A unit does no work from now on: one of its processes has died, or it did not come up.

    Attributes:
        is_news: it was not lost before, and is started again.
    """

    cause: WorkerError
    is_news: bool


class UnitSilent(UnitEvent):
    """A process of a unit that serves has given no sign of life for a while."""


class UnitServes(UnitEvent):
    """A unit does its work: it came up, or all of it is heard again."""


class UnitLeft(UnitEvent):
    """A unit is not wanted any more: it ends, and is not started again."""


@dataclass(frozen=True)
class RunFailed:
    """The run cannot go on: a unit was given up, or the number of workers cannot be written."""

    cause: WorkerError | RunFolderError


@dataclass(frozen=True)
class Wished:
    """Others than the script have asked the agent of a node for `leave` or `snapshot`."""

    wish: Wish


@dataclass(frozen=True)
class Scaled:
    """The number of rollout workers changes.

    Attributes:
        before: workers that stayed so far.
        number: workers that stay, or are to come, from now on.
    """

    before: int
    number: int
    why: str


@dataclass(frozen=True)
class PauseWished:
    """A person has paused the run or, with None, lets it go on."""

    wish: PauseWish | None


FleetEvent = UnitEvent | RunFailed | Wished | Scaled | PauseWished


class LifeState(StrEnum):
    """See the table above."""

    coming = "coming"
    launching = "launching"
    starting = "starting"
    built = "built"
    serving = "serving"
    silent = "silent"
    lost = "lost"
    given_up = "given up"
    left = "left"


class Stay(StrEnum):
    """Whether a unit is to go on."""

    stays = "stays"
    drains = "drains"
    closed = "closed"


_WORKING: Final = (LifeState.serving, LifeState.silent)
_ALIVE: Final = (LifeState.starting, LifeState.built, *_WORKING)


@dataclass(frozen=True)
class LifeEvent:
    """Something that was seen of a unit, or is wanted of it."""

    unit: str


@dataclass(frozen=True)
class Joined(LifeEvent):
    """A worker of a unit serves calls in a first start, or was found there.

    Attributes:
        is_adopted: an earlier start of the script has started it.
    """

    incarnation: str
    is_adopted: bool = False


class Wanted(LifeEvent):
    """A further unit is to be started."""


class Launching(LifeEvent):
    """New processes of a unit are asked for."""


@dataclass(frozen=True)
class Started(LifeEvent):
    """The processes of a unit serve calls: these lives of its workers."""

    incarnations: frozenset[str]


class Built(LifeEvent):
    """The engine of a unit can be called."""


class Serves(LifeEvent):
    """The controller has brought a unit up."""


@dataclass(frozen=True)
class Missed(LifeEvent):
    """A life of a worker has given no sign of life for a while."""

    incarnation: str


@dataclass(frozen=True)
class Heard(LifeEvent):
    """A life of a worker that was silent is heard again."""

    incarnation: str


@dataclass(frozen=True)
class Died(LifeEvent):
    """A life of a worker has ended, or must be taken for dead.

    Attributes:
        is_final: another life would be of no use.
    """

    incarnation: str
    cause: WorkerError
    is_final: bool = False


@dataclass(frozen=True)
class StartFailed(LifeEvent):
    """A unit that was being started does not come up; `is_final`: see `Died`."""

    cause: WorkerError
    is_final: bool = False


class Progressed(LifeEvent):
    """A unit has done something useful."""


class Retired(LifeEvent):
    """A unit is to leave."""


class Kept(LifeEvent):
    """A unit that was to leave stays after all."""


class Closed(LifeEvent):
    """A unit that is to leave gets no more work."""


class Dismissed(LifeEvent):
    """Nothing of a unit is needed any more."""


Tell = Callable[[LifeEvent | Wished], None]
"""Takes what is seen of workers, or of those who ask the agent of a node for something."""


@dataclass(frozen=True)
class StartUnit:
    """An instruction: kill what is left of the unit's processes, and start all of it anew.

    Attributes:
        after_s: pause between the two.
    """

    unit: str
    after_s: float


@dataclass(frozen=True)
class EndStart:
    """An instruction: what goes on to start a unit is of no use any more."""

    unit: str


@dataclass(frozen=True)
class EndRun:
    """An instruction: the run cannot go on.

    Attributes:
        cause: of the last death.
        num_deaths: in a row.
    """

    unit: str
    cause: WorkerError
    num_deaths: int


Output = StartUnit | EndStart | EndRun | UnitEvent


@dataclass(eq=False)
class Life:
    """Where a unit stands. Only `Lives` changes it.

    Attributes:
        incarnations: the present lives of its workers, while their deaths matter.
        silent: those of them that give no signs of life.
        is_adopted: an earlier start of the script has started some of them.
        cause: of a loss before the first start was over.
        has_served: the unit came up in this start, so its store counts as room.
        is_down: the unit has been lost since it last served, and that was told.
        num_restarts: decided on so far.
    """

    unit: str
    deaths: Deaths
    state: LifeState = LifeState.coming
    stay: Stay = Stay.stays
    incarnations: frozenset[str] = frozenset()
    silent: frozenset[str] = frozenset()
    is_adopted: bool = False
    cause: WorkerError | None = None
    has_served: bool = False
    is_down: bool = False
    num_restarts: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it does its work, and gives signs of life."""
        return self.state is LifeState.serving

    @property
    def is_up(self) -> bool:
        """Whether its engine can be called."""
        return self.state in (LifeState.built, *_WORKING)

    @property
    def is_leaving(self) -> bool:
        return self.stay is not Stay.stays

    @property
    def is_closed(self) -> bool:
        return self.stay is Stay.closed


class Lives:
    """The units of one role.

    Args:
        max_deaths: of one unit in a row, without anything useful in between; the next one ends the
            run. 0: the first one does.
        unit: of all workers of the role; "": each is a unit of its own.

    Attributes:
        num_restarts: decided on so far.
        has_begun: the first start is over.
        has_failed: a unit was given up: nothing is started any more.
    """

    def __init__(self, max_deaths: int, unit: str = "") -> None:
        self.num_restarts = 0
        self.has_begun = False
        self.has_failed = False
        self._max_deaths = max_deaths
        self._unit = unit
        self._lives: dict[str, Life] = {}

    def __iter__(self) -> Iterator[Life]:
        return iter(self._lives.values())

    def of(self, order: WorkerOrder) -> Life:
        """The life of the unit that a worker belongs to; a new unit is still to come."""
        unit = self._unit or order.name
        return self._lives.setdefault(unit, Life(unit, Deaths(self._max_deaths)))

    def begin(self) -> list[Output]:
        """The first start is over: those that came up do their work, the others are started."""
        self.has_begun = True
        return [output for life in self for output in self._begin(life)]

    def on(self, event: LifeEvent) -> list[Output]:
        """What is to be done about an event, and what controllers are told of it."""
        life = self._lives.get(event.unit)
        if life is None or life.state is LifeState.given_up:
            return []
        match event, life.state:
            case Joined(_, incarnation, is_adopted), LifeState.coming | LifeState.starting:
                life.state, life.has_served = LifeState.starting, True
                life.incarnations |= {incarnation}
                life.is_adopted |= is_adopted
            case Wanted(), LifeState.coming:
                return [StartUnit(life.unit, 0.0)]
            case Launching(), LifeState.coming | LifeState.starting | LifeState.lost:
                life.state = LifeState.launching
                life.incarnations = life.silent = frozenset()
            case Started(_, incarnations), LifeState.launching:
                life.state, life.incarnations = LifeState.starting, incarnations
                life.is_adopted = False
            case Built(), LifeState.starting:
                life.state, life.has_served = LifeState.built, True
            case Serves(), LifeState.starting | LifeState.built:
                return _serve(life)
            case Missed(_, incarnation), _ if incarnation in life.incarnations:
                return _hear(life, life.silent | {incarnation})
            case Heard(_, incarnation), _:
                return _hear(life, life.silent - {incarnation})
            case Died(_, incarnation, cause, is_final), _:
                if is_final or (incarnation in life.incarnations and self.has_begun):
                    return self._lose(life, cause, is_final=is_final)
                if incarnation in life.incarnations and life.is_adopted:
                    return _lose_before_begin(life, cause)
                if incarnation in life.incarnations:
                    return self._lose(life, cause, is_final=True)
            case StartFailed(_, cause, is_final), _ if life.state not in _WORKING:
                return self._lose(life, cause, is_final=is_final)
            case Progressed(), LifeState.serving | LifeState.silent:
                life.deaths.number = 0
            case Retired(), _:
                life.stay = Stay.drains
            case Kept(), _:
                life.stay = Stay.stays
            case Closed(), _ if life.is_leaving:
                life.stay = Stay.closed
            case Dismissed(), _:
                return self._dismiss(life)
        return []

    def _begin(self, life: Life) -> list[Output]:
        if life.state is LifeState.coming:
            return [StartUnit(life.unit, 0.0)]
        if life.state is LifeState.lost and life.cause is not None:
            return self._lose(life, life.cause, is_final=False)
        return _serve(life) if life.state is LifeState.starting else []

    def _lose(self, life: Life, cause: WorkerError, *, is_final: bool) -> list[Output]:
        had_processes, was_down = life.state in _ALIVE, life.is_down
        life.incarnations = life.silent = frozenset()  # the other workers' ends say nothing new
        pause_s = life.deaths.note_death(is_final=is_final)
        if pause_s is None:
            self.has_failed, life.state = True, LifeState.given_up
            end = EndRun(life.unit, cause, life.deaths.number)
            return [UnitLost(life.unit, cause, is_news=False), end]
        self.num_restarts += 1
        life.num_restarts += 1
        life.state, life.is_down = LifeState.lost, True
        outputs = list[Output]()
        if had_processes or not was_down:
            outputs.append(UnitLost(life.unit, cause, is_news=not was_down))
        if not self.has_failed:
            outputs.append(StartUnit(life.unit, pause_s))
        return outputs

    def _dismiss(self, life: Life) -> list[Output]:
        del self._lives[life.unit]
        was_launching, life.state = life.state is LifeState.launching, LifeState.left
        told: list[Output] = [UnitLeft(life.unit)]
        # a process that is on its way would be there without anybody's knowledge
        return told if was_launching else [*told, EndStart(life.unit)]


def _lose_before_begin(life: Life, cause: WorkerError) -> list[Output]:
    """A worker that was found has died; what replaces it is started when the run begins."""
    was_told = life.state in (LifeState.serving, LifeState.silent)
    life.state, life.cause = LifeState.lost, cause
    life.incarnations = life.silent = frozenset()
    life.is_down |= was_told
    return [UnitLost(life.unit, cause, is_news=True)] if was_told else []


def _serve(life: Life) -> list[Output]:
    life.state = LifeState.silent if life.silent else LifeState.serving
    life.is_down, life.has_served = False, True
    return [UnitServes(life.unit)]


def _hear(life: Life, silent: frozenset[str]) -> list[Output]:
    life.silent = silent
    match life.state, bool(silent):
        case LifeState.serving, True:
            life.state = LifeState.silent
            return [UnitSilent(life.unit)]
        case LifeState.silent, False:
            life.state = LifeState.serving
            return [UnitServes(life.unit)]
        case _:
            return []
