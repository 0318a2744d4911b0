"""What a controller hears of its workers.

Each controller has one function, `_hear`, that says who of it acts on what; whoever follows a run
listens to the same events (`Controller.heard_by`). A *unit* is a rollout worker, or all ranks of a
model; see `worker_life`.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.errors import RunFolderError, WorkerError
from areal_sc.nodes.spec import Wish
from areal_sc.run.run_status import PauseWish


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
    """A unit that was lost is not wanted any more: it is not started again."""


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
