"""Admission: how many groups may begin now, within the staleness bound and just in time.

Eq. 3 of AReaL (arXiv:2505.24298) admits while N < (i + eta + 1) B. Where generation keeps up with
training, that lets every row wait until it is as stale as the bound allows, and nothing is gained.
So admission goes on while N < (i + lead + 1) B, with a *lead* of 1 to eta steps that follows the
trainer:

    slack    how long a batch stood complete before the trainer asked for it, less how long the
             trainer waited for it, in steps
    free     share of the step in which engines had a free place, as no answer waited for one
    queue    answers that waited for a place when there were fewest, in steps

    the batch was in time    lead += GAIN * (TARGET_SLACK - slack); FALL * (...) where it falls
    the trainer waited       lead += free * (what it waited, in times of the rest of its step, one
                             step at most, and a little more) - GAIN * (queue - KEPT_QUEUE)

The first is an integral controller: the lead settles where a batch is complete a little before it
is asked for. The second hurries where time is lost. But where generation is the slower side, and
all places of its engines are taken, groups that begin earlier would only wait in a queue, and get
older. There the lead settles where the queue never runs empty; where places stay free, it is eta.

Pure but for the clock that it is given.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

from areal_sc.config.schema import AdmissionMode, RolloutConfig
from areal_sc.controller.rollout.staleness import StalenessPolicy
from areal_sc.errors import ConfigError

GAIN: Final = 0.25
FALL: Final = 0.1
"""Instead of it where the lead falls: a wait costs more than a row that is a little older."""
TARGET_SLACK: Final = 0.3
"""In steps. In simulations 0.4 saves up to 0.6 % of step time where steps are disturbed, and rows
are 5 to 10 % older."""
AFTER_WAIT: Final = 0.15
"""Steps that the lead grows by after any wait, beside the wait itself."""
KEPT_QUEUE: Final = 0.6
"""In steps: what may wait for a place in engines, so that none is free when a step takes longer."""
LEAST_LEAD: Final = 1.0
"""With less, a part of each batch begins only when the trainer already waits for it."""


class Admission:
    """Says how many groups may be admitted.

    Args:
        clock: seconds.

    Attributes:
        total_steps: training steps that the run will make; nothing is admitted beyond what they
            need. None admits without end.
        lead: steps that generation may be ahead of training, from 1 to `max_staleness`; 0 if
            that is 0.
        slack: of the newest batch, in steps; None where it is not known.
        free_share: share of the time between the newest two batches in which engines had free
            places; 1 where no group ended.
    """

    def __init__(
        self, config: RolloutConfig, policy: StalenessPolicy, clock: Callable[[], float]
    ) -> None:
        self.total_steps: int | None = config.total_steps or None
        self.slack: float | None = None
        self.free_share = 1.0
        self._group_size = config.group_size
        self._policy = policy
        self._clock = clock
        self._is_eager = config.admission is AdmissionMode.eager
        self.lead = self._within(math.inf if self._is_eager else LEAST_LEAD)
        self._complete_s: deque[float] = deque()  # when each batch of finished groups was there
        self._asked_s: float | None = None
        self._formed_s: float | None = None
        self._queues: dict[str, _Queue] = {}

    @property
    def spare_lead(self) -> float:
        """How much more work generation could be given, as a share of what the bound allows.

        Nothing without staleness: each batch begins as soon as that is allowed.
        """
        most = self._policy.max_staleness
        return (1 - self.lead / most) * self.free_share if most else 0.0

    def num_admissible(self, version: int, num_admitted_not_rejected: int) -> int:
        """How many groups may be admitted now; never more than eq. 3 allows.

        While fewer than a batch are left to be trained at `version`, it is at least what lacks.
        """
        size, num = self._policy.train_batch_groups, num_admitted_not_rejected
        just_in_time = math.floor((version + self.lead + 1) * size) - num
        number = min(just_in_time, self._policy.num_admissible(version, num))
        if self.total_steps is not None:
            number = min(number, self.total_steps * size - num)
        return max(0, number)

    def note_finished(self, num_finished: int) -> None:
        """Notes how many groups are finished and not yet in a batch."""
        num_batches = num_finished // self._policy.train_batch_groups
        while len(self._complete_s) > num_batches:
            self._complete_s.pop()
        while len(self._complete_s) < num_batches:
            self._complete_s.append(self._clock())

    def note_end(self, worker: str, num_waiting: int) -> None:
        """A group has ended on a worker.

        Args:
            num_waiting: answers that wait for a place in the worker's engine.
        """
        if self._formed_s is not None:
            queue = self._queues.setdefault(worker, _Queue(self._formed_s))
            queue.note_waiting(self._clock(), num_waiting)

    def note_asked(self, version: int) -> None:
        """The trainer asks for the batch of a version; only the first time counts.

        Raises: ConfigError: all of `total_steps` are trained.
        """
        if self.total_steps is not None and version >= self.total_steps:
            raise ConfigError(
                f"there is no batch for policy version {version}: total_steps is "
                f"{self.total_steps}; train fewer steps, or raise it"
            )
        if self._asked_s is None:
            self._asked_s = self._clock()

    def note_batch(self, num_finished: int) -> None:
        """The batch that was asked for is formed, and leaves so many finished groups."""
        asked_s, formed_s, now_s = self._asked_s, self._formed_s, self._clock()
        self.slack = None
        complete_s = self._complete_s.popleft() if self._complete_s else None
        if asked_s is not None and formed_s is not None and complete_s is not None:
            slack_s = max(0.0, asked_s - complete_s) - (now_s - asked_s)
            step_s = max(now_s - formed_s, 1e-9)
            self.slack = slack_s / step_s
            queues = self._queues.values()
            free_s = [queue.free_s(now_s) for queue in queues]
            self.free_share = fmean(free_s) / step_s if free_s else 1.0
            num_waiting = sum(queue.least for queue in queues)
            self._follow(
                self.slack, num_waiting / (self._group_size * self._policy.train_batch_groups)
            )
        self._asked_s, self._formed_s = None, now_s
        self._queues.clear()
        self.note_finished(num_finished)

    def go_on(self, version: int, num_admitted_not_rejected: int) -> None:
        """The lead is what an earlier start of the script has admitted."""
        if not self._is_eager:
            size = self._policy.train_batch_groups
            self.lead = self._within(num_admitted_not_rejected / size - version - 1)

    def forget(self) -> None:
        """Times until now say nothing of the next batch; the lead stays."""
        self._asked_s = self._formed_s = None
        self._complete_s.clear()
        self._queues.clear()

    def _follow(self, slack: float, queue: float) -> None:
        """Args: queue: in steps, when it was shortest."""
        if self._is_eager:
            return
        if slack >= 0:
            change = (GAIN if slack < TARGET_SLACK else FALL) * (TARGET_SLACK - slack)
        else:
            waited = min(0.5, -slack)
            change = self.free_share * (waited / (1 - waited) + AFTER_WAIT)
            change -= GAIN * max(0.0, queue - KEPT_QUEUE)
        self.lead = self._within(self.lead + change)

    def _within(self, lead: float) -> float:
        return min(max(LEAST_LEAD, lead), float(self._policy.max_staleness))


class _Queue:
    """Answers that wait for a place in one worker's engine, as the ends of groups tell.

    Attributes:
        least: the fewest that waited.
    """

    def __init__(self, began_s: float) -> None:
        self.least = math.inf
        self._free_s = 0.0
        self._seen_s = began_s
        self._num_waiting = 0.0

    def note_waiting(self, now_s: float, num_waiting: int) -> None:
        if not num_waiting:  # nor did one before, since the last time that it was looked at
            self._free_s += now_s - self._seen_s
        self.least = min(self.least, num_waiting)
        self._seen_s, self._num_waiting = now_s, num_waiting

    def free_s(self, now_s: float) -> float:
        """Seconds until now in which none waited."""
        return self._free_s + (0.0 if self._num_waiting else now_s - self._seen_s)
