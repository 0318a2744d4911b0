"""Deaths of workers as a user reads them: what is being repaired, then one sentence for each.

    lost ──► an outage begins, or one of the same cause gets one worker more
    back ──► when the last of its workers is back, the outage is told

Those that go on are shown meanwhile.

One event, a fork server's death say, takes several workers along; they make one outage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from areal_sc.errors import WorkerError
from areal_sc.fleet.worker_life import FleetEvent, UnitLeft, UnitLost, UnitServes
from areal_sc.quantities import short_duration

SAME_EVENT_S: Final = 5.0
"""Workers that are lost so soon after each other, of the same cause, are lost by one event.

The controllers of two roles hear of it at different times, and of a node by different words."""


@dataclass(frozen=True)
class Outage:
    """Workers that were lost, and do their work again.

    Attributes:
        cause: in words that follow their names.
        duration_s: until the last of them did its work again.
        num_groups: of training that run again.
    """

    workers: tuple[str, ...]
    cause: str
    duration_s: float
    num_groups: int

    def __str__(self) -> str:
        duration = short_duration(self.duration_s)
        text = f"{_listed(self.workers)} {self.cause}; started again in {duration}"
        if self.num_groups:
            is_one = self.num_groups == 1
            text += "; 1 group runs again" if is_one else f"; {self.num_groups} groups run again"
        return text


@dataclass(eq=False)
class _Open:
    began_s: float
    cause: str
    units: set[str] = field(default_factory=set)
    num_before: dict[str, int] = field(default_factory=dict)  # of each worker

    def __str__(self) -> str:
        return f"{_listed(self.num_before)} {self.cause}; being started again"


@dataclass(eq=False)
class Outages:
    """Makes outages of what controllers tell of units.

    Args:
        show: is called with the sentences of those that go on, whenever they change.
        tell: is called with each outage that is over.
        groups_run_again: how often groups had to run again, by the worker that was lost.
    """

    show: Callable[[Sequence[str]], None]
    tell: Callable[[Outage], None]
    groups_run_again: Callable[[], Mapping[str, int]]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._open: list[_Open] = []

    def hear(self, event: FleetEvent) -> None:
        """A unit is lost, or back, or not wanted any more; nothing else matters here."""
        match event:
            case UnitLost(unit, cause, is_news=True):
                self._lose(unit, cause)
            case UnitServes(unit) | UnitLeft(unit) if self._open:
                for outage in self._open:
                    outage.units.discard(unit)
            case _:
                return
        over = [outage for outage in self._open if not outage.units]
        self._open = [outage for outage in self._open if outage.units]
        self.show([str(outage) for outage in self._open])
        for outage in over:
            self.tell(self._ended(outage))

    def _lose(self, unit: str, error: WorkerError) -> None:
        worker, cause = _worker_and_cause(unit, error)
        now_s = self.clock()
        for outage in self._open:
            is_same = outage.cause.partition(":")[0] == cause.partition(":")[0]
            if is_same and now_s - outage.began_s < SAME_EVENT_S:
                break
        else:
            outage = _Open(now_s, cause)
            self._open.append(outage)
        outage.units.add(unit)
        outage.num_before[worker] = self.groups_run_again().get(worker, 0)

    def _ended(self, outage: _Open) -> Outage:
        num_now = self.groups_run_again()
        return Outage(
            tuple(outage.num_before),
            outage.cause,
            self.clock() - outage.began_s,
            sum(num_now.get(worker, 0) - num for worker, num in outage.num_before.items()),
        )


def _listed(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _worker_and_cause(unit: str, error: WorkerError) -> tuple[str, str]:
    """The worker and the cause in a message such as "worker rollout/1 ended with signal 9
    (SIGKILL); its log is ..."."""
    text = str(error).removesuffix(f"; its log is {error.log_path}")
    kind, _, rest = text.partition(" ")
    if kind != "worker":
        return unit, f"was lost: {text}"
    worker, _, cause = rest.partition(" ")
    return worker, cause
