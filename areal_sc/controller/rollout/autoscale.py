"""Autoscaling: how many rollout workers a run needs, found by trying. Pure.

    the trainer waits, and more work would not help the workers        more workers
    it never waits, and more are on their way                          these are not needed
    it never waits, and admission could be further ahead               one less, as a trial
    one less made it wait                                              back, and not again for long
    more did not make it wait less                                     back, and not again for long

How much a worker gives depends on lengths, batch sizes and what else runs, so no figure says
beforehand what one more or less will do. What a batch tells is its *slack*, in steps (see
`admission`): negative is the share of the step that the trainer waited. If it waited for a share w,
generation is the slower side, and n workers would have to be n / (1 - w).

Two things keep the number from swinging: what is looked at is the mean over several steps in which
nothing changed, was lost or was being started; and a number that was tried in vain is not tried
again for a while, which doubles each time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from areal_sc.config.parallel_settings import AutoscaleConfig

SETTLE_STEPS: Final = 4
"""After a change groups of before are still trained, and admission finds its new lead."""
URGENT_STEPS: Final = 4
STEPS: Final = 8
"""Number of the newest steps that are looked at; fewer, if the trainer waits long."""
WAITS: Final = 0.05
WAITS_LONG: Final = 0.2
"""Shares of its time that the trainer may wait before there are more workers, or at once."""
NEVER_WAITS: Final = 0.01
NO_LEAD: Final = 0.15
"""With less to spare of its lead, admission is as far ahead as it may be, or nearly."""
SPARE_LEAD: Final = 0.25
SPARE_SLACK: Final = 0.5
"""With less of both, admission cannot make up for a worker; slack in steps."""
ROUNDING: Final = 0.1
"""Workers: the share that the trainer waits is not known better."""
HELPED: Final = 0.9
"""More workers have helped if the trainer waits less than this share of what it waited before, in
times of the rest of its step: where it waits for nearly all of a step, shares hardly differ."""
FIRST_PATIENCE: Final = 64
LONGEST_PATIENCE: Final = 2048
"""Steps in which a number is not tried again."""


class SeenStep(NamedTuple):
    """What a batch tells of the workers.

    Attributes:
        num_workers: that there are, but for those that leave, or wait for their node.
        slack: see `Admission.slack`.
        spare_lead: see `Admission`; 0: workers have all the work that they can take, or may get.
        is_steady: all these workers did their work, and nobody else, since the batch before.
        num_coming: further ones, which were asked for, and whose nodes are on their way.
    """

    num_workers: int
    slack: float | None
    spare_lead: float
    is_steady: bool
    num_coming: int = 0


class SizeChange(NamedTuple):
    """The number of workers that there should be, and why.

    Attributes:
        why: in words, for the log.
    """

    num_workers: int
    why: str


@dataclass
class _Vain:
    """A number of workers that was of no use.

    Attributes:
        until: it is not tried before this step.
        patience: steps that it is left out for the next time.
    """

    until: int
    patience: int


class Autoscaler:
    """Decides about the number of workers, batch by batch."""

    def __init__(self, config: AutoscaleConfig) -> None:
        self._config = config
        self._step = 0
        self._num_workers = 0
        self._rest = 0  # steps that are not looked at
        self._seen: deque[SeenStep] = deque(maxlen=STEPS)
        self._before = 0  # workers before a change that is not judged yet; 0: there is none
        self._waited_before = 0.0
        self._trial = 0  # the number that a trial has led to, and when it began
        self._trial_step = 0
        self._vain: dict[int, _Vain] = {}

    def note_step(self, seen: SeenStep) -> SizeChange | None:
        """A batch was formed; what is to be done, if anything."""
        self._step += 1
        if seen.num_workers != self._num_workers:  # somebody else has changed it
            self._forget(seen.num_workers)
            self._before = 0
        if not seen.is_steady:
            self._forget(seen.num_workers)
            return None
        if self._rest:
            self._rest -= 1
            return None
        if seen.slack is None:
            return None
        self._seen.append(seen)
        change = self._more() or self._fewer()
        if change is not None:
            self._forget(change.num_workers)
        elif len(self._seen) >= STEPS:
            self._before = 0
        return change

    def refuse(self, num_workers: int) -> None:
        """There cannot be so many workers."""
        self._vain[num_workers] = _Vain(self._step + LONGEST_PATIENCE, LONGEST_PATIENCE)

    def _more(self) -> SizeChange | None:
        num, seen = self._num_workers, list(self._seen)
        if _waited(seen[-URGENT_STEPS:]) > WAITS_LONG:
            seen = seen[-URGENT_STEPS:]
        elif len(seen) < STEPS:
            return None
        waited = _waited(seen)
        if len(seen) < URGENT_STEPS or waited <= WAITS or _spare_lead(seen) > NO_LEAD:
            return None
        share = f"the trainer waits {waited:.0%} of its time"
        before = self._before
        if 0 < before < num and _rests(waited) > HELPED * _rests(self._waited_before):
            for number in range(before + 1, num + 1):  # fewer of them help less still
                self._note_vain(number)
            return self._to(before, waited, f"{share}, as with {before} workers")
        if num == self._trial and self._step < self._trial_step + FIRST_PATIENCE:
            self._note_vain(num)
        wanted = math.ceil(num / (1 - min(waited, 0.5)) - ROUNDING)
        wanted = min(max(wanted, num + 1), self._config.max)
        while wanted > num and self._is_vain(wanted):
            wanted -= 1
        if wanted <= num + seen[-1].num_coming:
            return None  # they have been asked for
        return self._to(wanted, waited, f"generation is too slow: {share}")

    def _fewer(self) -> SizeChange | None:
        num, seen = self._num_workers, self._seen
        if len(seen) < STEPS or _waited(seen) > NEVER_WAITS:
            return None
        if seen[-1].num_coming:
            return self._to(num, 0.0, "the trainer never waits: those on their way are not needed")
        if _spare_lead(seen) < SPARE_LEAD and sum(map(_slack, seen)) <= SPARE_SLACK * len(seen):
            return None
        if num <= self._config.min or self._is_vain(num - 1):
            return None
        self._trial, self._trial_step = num - 1, self._step
        return self._to(num - 1, 0.0, "the trainer never waits: one less may be enough")

    def _to(self, num_workers: int, waited: float, why: str) -> SizeChange:
        self._before, self._waited_before = self._num_workers, waited
        return SizeChange(num_workers, why)

    def _forget(self, num_workers: int) -> None:
        self._num_workers, self._rest = num_workers, SETTLE_STEPS
        self._seen.clear()

    def _is_vain(self, num_workers: int) -> bool:
        vain = self._vain.get(num_workers)
        return vain is not None and self._step < vain.until

    def _note_vain(self, num_workers: int) -> None:
        earlier = self._vain.get(num_workers)
        patience = FIRST_PATIENCE if earlier is None else earlier.patience
        longer = min(2 * patience, LONGEST_PATIENCE)
        self._vain[num_workers] = _Vain(self._step + patience, longer)


def _slack(step: SeenStep) -> float:
    return step.slack or 0.0


def _rests(waited: float) -> float:
    """The same in times of the rest of the step."""
    return waited / max(1e-9, 1 - waited)


def _spare_lead(steps: Sequence[SeenStep]) -> float:
    return sum(step.spare_lead for step in steps) / max(1, len(steps))


def _waited(steps: Sequence[SeenStep]) -> float:
    """Mean share of a step that the trainer waited."""
    return sum(max(0.0, -_slack(step)) for step in steps) / max(1, len(steps))
