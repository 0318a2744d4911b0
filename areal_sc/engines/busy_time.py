"""How long something that generates was busy, and how the time of a token follows its load."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple


@dataclass
class TurnSums:
    """Over tokens: n answers ran, and the turn in which the token was made took t seconds.

    A line through t by n, which says what a turn would take with another load, follows from these
    sums, and those of several engines and times may be added.

    Attributes:
        turn_tokens: 1. turn_answers: n. turn_answers2: n * n. turn_s: t. turn_answers_s: n * t.
    """

    turn_tokens: float = 0.0
    turn_answers: float = 0.0
    turn_answers2: float = 0.0
    turn_s: float = 0.0
    turn_answers_s: float = 0.0

    def add(self, num_tokens: int, num_running: float, seconds: float) -> None:
        """Adds tokens, each made in a turn of `seconds` while `num_running` answers ran."""
        self.turn_tokens += num_tokens
        self.turn_answers += num_tokens * num_running
        self.turn_answers2 += num_tokens * num_running**2
        self.turn_s += num_tokens * seconds
        self.turn_answers_s += num_tokens * num_running * seconds


class Begun(NamedTuple):
    """When an answer began, in generating time, and the integral of the running ones until then."""

    at_s: float
    answers_s: float


class BusyTime:
    """Integrates the number of running answers over time.

    While new weights stop a server, it is busy, but its answers get no tokens: this time counts in
    no turn.

    Attributes:
        busy_s: time in which there was at least one.
        turns: of answers that have ended, with the means over their time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.busy_s = 0.0
        self.turns = TurnSums()
        self._clock = clock
        self._at_s = clock()
        self._stopped_until_s = self._at_s
        self._generating_s = 0.0
        self._answers_s = 0.0
        self._num_running = 0

    def note(self, num_running: int) -> None:
        """Brings the times up to now; from now on `num_running` answers run."""
        now_s = self._clock()
        generating_s = now_s - min(now_s, max(self._at_s, self._stopped_until_s))
        self._generating_s += generating_s
        self._answers_s += generating_s * self._num_running
        self.busy_s += now_s - self._at_s if self._num_running else 0.0
        self._at_s = now_s
        self._num_running = num_running

    def stop(self, until_s: float = math.inf) -> None:
        """No answer gets a token until then, by the clock, or until `go_on`."""
        self.note(self._num_running)
        self._stopped_until_s = until_s

    def go_on(self) -> None:
        """Answers get tokens again."""
        self.note(self._num_running)
        self._stopped_until_s = self._at_s

    def begin(self) -> Begun:
        """An answer begins, which is noted already; `end` takes what is returned."""
        return Begun(self._generating_s, self._answers_s)

    def end(self, begun: Begun, num_tokens: int) -> None:
        """The answer has ended, or was interrupted, with so many tokens."""
        self.note(self._num_running)
        passed_s = self._generating_s - begun.at_s
        if num_tokens and passed_s > 0:
            num_running = (self._answers_s - begun.answers_s) / passed_s
            self.turns.add(num_tokens, num_running, passed_s / num_tokens)
