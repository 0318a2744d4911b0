"""Whether a server that does not answer is busy, hung or dead.

The question goes to the scheduler, which answers between two steps, also while it is paused. The
HTTP process alone proves nothing: it goes on answering for a scheduler that hangs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from areal_sc.engines.servers.sglang.processes import ProcessState, read_process


class Health(StrEnum):
    """What is known of a server.

    responsive: its scheduler answers.
    busy: it does not answer, but computes.
    paused: it was told to pause; it answers, and generates nothing.
    updating: its weights are being replaced.
    hung: it runs, and neither answers nor computes.
    dead: it has ended, or cannot be reached.
    """

    responsive = "responsive"
    busy = "busy"
    paused = "paused"
    updating = "updating"
    hung = "hung"
    dead = "dead"


@dataclass(frozen=True)
class Limits:
    """After how many seconds without an answer a server counts as hung.

    Attributes:
        hung_after_s: when one of its processes has not computed in that time.
        busy_limit_s: in any case.
    """

    hung_after_s: float
    busy_limit_s: float


@dataclass
class Activity:
    """What the processes of a server did since its last answer.

    Attributes:
        main: the HTTP process; None when the server runs on another machine.
        schedulers: those that compute.
    """

    main: int | None = None
    schedulers: Sequence[int] = ()
    _ticks_at_answer: dict[int, int] = field(default_factory=dict)

    def note_answer(self) -> None:
        """Counts from here."""
        self._ticks_at_answer = {pid: s.cpu_ticks for pid, s in self._states(self.schedulers)}

    def ended(self) -> list[int]:
        """Processes that are there no more."""
        return [pid for pid in self._all() if read_process(pid) is None]

    def stopped(self) -> list[int]:
        """Processes that a signal has stopped."""
        return [pid for pid, state in self._states(self._all()) if state.is_stopped]

    def idle(self) -> list[int]:
        """Schedulers that have computed nothing since the answer."""
        before = self._ticks_at_answer
        return [pid for pid, s in self._states(before) if s.cpu_ticks <= before[pid]]

    def _all(self) -> list[int]:
        return [] if self.main is None else [self.main, *self.schedulers]

    @staticmethod
    def _states(pids: Iterable[int]) -> Iterator[tuple[int, ProcessState]]:
        for pid in pids:
            state = read_process(pid)
            if state is not None:
                yield pid, state


def judge(
    silent_s: float, activity: Activity, limits: Limits, *, is_updating: bool
) -> tuple[Health, str]:
    """The health of a server that can be reached, and what makes it so.

    Args:
        silent_s: time since its scheduler's last answer.
        is_updating: it may be silent while it loads weights; that has a limit of its own, and a
            member of a collective operation waits without computing.
    """
    if gone := activity.ended():
        return Health.dead, f"its process {gone[0]} has ended"
    if silent_s < limits.hung_after_s:
        return Health.responsive, ""
    silence = f"it has not answered for {silent_s:.1f} s"
    if stopped := activity.stopped():
        return Health.hung, f"{silence}, and its process {stopped[0]} is stopped"
    if is_updating:
        return Health.updating, ""
    if idle := activity.idle():
        return Health.hung, f"{silence}, and its process {idle[0]} has computed nothing"
    if activity.main is None:
        return Health.hung, silence
    if silent_s >= limits.busy_limit_s:
        return Health.hung, f"{silence}, though it computes"
    return Health.busy, silence
