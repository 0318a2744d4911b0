"""A run on simulated time: the controllers' own admission and batches, servers that take turns.

A worker's servers give each of their running answers one token a turn, and turns take as long as
was measured. What training takes for tokens is divided among the ranks. Lengths of answers are
drawn from those that fit what was measured (`lengths`). What a group takes beyond its answers
(rewards, tools) is given. An update stops a server for as long as was measured at the present
point; elsewhere the part for keys and values is longer or shorter as the server then holds more
tokens or fewer. Where all processes are on one machine, those that compute at the same time slow
each other down (`SharedCores`).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from areal_sc.config.schema import AdmissionMode, GRPOConfig, RolloutConfig
from areal_sc.controller.ledger.group import Group, GroupState
from areal_sc.controller.rollout.admission import Admission
from areal_sc.controller.rollout.staleness import StalenessPolicy
from areal_sc.metadata import PromptReference
from areal_sc.planning.cores import SharedCores
from areal_sc.planning.figures import Figures, OperatingPoint
from areal_sc.planning.lengths import Lengths

NUM_STEPS: Final = 48
NUM_SETTLING: Final = 16
"""Steps of a simulation, and the first ones, which are not counted."""
MAX_SERVERS: Final = 16
"""Most servers that are simulated: of more a part is, with the same part of the groups."""
_PROMPT: Final = PromptReference(0, 0, 0)


@dataclass(frozen=True)
class Pace:
    """How fast a side computes beside everything else; alone, at 1."""

    training: float = 1.0
    generation: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """Means over steps.

    Attributes:
        step_s, wait_s: of a step.
        group_s: from the start of a group to its end.
        staleness: of groups when they are trained, in policy versions.
        held_tokens: of a server's answers when new weights come.
        pace: of what computes.
    """

    point: OperatingPoint
    step_s: float
    wait_s: float
    group_s: float
    staleness: float
    held_tokens: float
    pace: Pace


class _Server:
    """All running answers get their tokens at the same pace, so progress is counted in turns."""

    def __init__(self, figures: Figures, slots: int) -> None:
        self._figures = figures
        self._slots = slots
        self._stopped_s = 0.0
        self._turns = 0.0
        self._running: list[tuple[float, int, float]] = []  # turn of its end; group; first turn
        self._waiting: list[tuple[float, int]] = []  # tokens, group

    @property
    def num_answers(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, num_tokens: float, group: int) -> None:
        """An answer begins, or waits for its place."""
        self._waiting.append((num_tokens, group))
        self._fill()

    @property
    def held_tokens(self) -> float:
        """Tokens of running answers, each with its prompt."""
        prompt_tokens = self._figures.prompt_tokens
        return sum(prompt_tokens + self._turns - begun for _, _, begun in self._running)

    def update(self, usual_tokens: float) -> None:
        """New weights stop it, and the keys and values of its answers are computed anew.

        Args:
            usual_tokens: `held_tokens` for which that takes as long as was measured; 0: any number.
        """
        share = self.held_tokens / usual_tokens if usual_tokens else 1.0
        self._stopped_s += self._figures.update_s + self._figures.recompute_s * share

    @property
    def next_end_s(self) -> float:
        """Until an answer ends, at full speed."""
        if not self._running:
            return math.inf
        return self._stopped_s + max(0.0, self._running[0][0] - self._turns) * self._turn_s

    def advance(self, seconds: float) -> Iterator[int]:
        """Time passes; gives the groups of the answers that have ended."""
        stopped_s = min(self._stopped_s, seconds)
        self._stopped_s -= stopped_s
        seconds -= stopped_s
        if not self._running:
            return
        self._turns += seconds / self._turn_s
        while self._running and self._running[0][0] <= self._turns + 1e-9:
            yield heapq.heappop(self._running)[1]
        self._fill()

    @property
    def _turn_s(self) -> float:
        return self._figures.turn.seconds(len(self._running))

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            num_tokens, group = self._waiting.pop(0)
            heapq.heappush(self._running, (self._turns + num_tokens, group, self._turns))


@dataclass
class _Work:
    """What a side has computed, in seconds of one that computes alone, and in how many seconds."""

    done_s: float = 0.0
    spent_s: float = 0.0

    def add(self, seconds: float, speed: float) -> None:
        self.done_s += seconds * speed
        self.spent_s += seconds

    @property
    def pace(self) -> float:
        return self.done_s / self.spent_s if self.spent_s else 1.0


class SimulatedRun:
    """One run.

    Args:
        figures: what everything takes that computes alone.
        point: where it runs; settings that it does not name are those of `config`.
        beside_s: of a group beyond its answers.
        cores: of the machine that all processes share; None: they do not share one.
        usual_tokens: a server's answers hold so many when an update takes as long as in `figures`;
            0: any number.
    """

    def __init__(
        self,
        figures: Figures,
        config: GRPOConfig,
        point: OperatingPoint,
        lengths: Lengths,
        beside_s: float,
        cores: SharedCores | None,
        usual_tokens: float,
    ) -> None:
        self._figures = figures
        self._usual_tokens = usual_tokens
        self._point = point
        self._beside_s = beside_s
        self._cores = cores
        self._threads = (config.actor.num_threads or 1, config.rollout.num_threads)
        num_servers = point.num_rollout_workers
        part = min(1.0, MAX_SERVERS / num_servers)
        self._settings = _scaled(config.rollout, point, part)
        slots = config.rollout.max_running_sequences
        self._servers = [_Server(figures, slots) for _ in range(max(1, round(num_servers * part)))]
        policy = StalenessPolicy(
            point.max_staleness, self._settings.train_batch_groups, self._settings.over_bound
        )
        self._policy = policy
        self._admission = Admission(self._settings, policy, lambda: self._now_s)
        self._now_s = 0.0
        self._version = 0
        self._num_admitted = 0  # and not rejected
        self._num_ever = 0
        self._open: dict[int, tuple[Group, float]] = {}
        self._left: dict[int, int] = {}
        self._may_form = True  # something has happened since a batch was last tried
        self._late: list[tuple[float, int]] = []  # when a group's rewards are there
        self._finished: dict[int, Group] = {}
        self._training_s: float | None = None
        self._asked_s = 0.0
        self._lengths = lengths
        self._rng = random.Random(0)
        self._ends: list[float] = []
        self._waits: list[float] = []
        self._group_times: list[float] = []
        self._ages: list[float] = []
        self._held_tokens: list[float] = []
        self._training, self._generation = _Work(), _Work()

    def forecast(self) -> Forecast:
        """Runs to the end. Raises: RuntimeError: nothing can go on."""
        self._ask()
        while self._version < NUM_STEPS:
            self._advance()
        first, last = self._ends[NUM_SETTLING - 1], self._ends[-1]
        num = NUM_STEPS - NUM_SETTLING
        return Forecast(
            self._point,
            step_s=(last - first) / num,
            wait_s=sum(self._waits[NUM_SETTLING:]) / num,
            group_s=sum(self._group_times) / max(1, len(self._group_times)),
            staleness=sum(self._ages[NUM_SETTLING:]) / num,
            held_tokens=sum(self._held_tokens) / len(self._held_tokens),
            pace=Pace(self._training.pace, self._generation.pace),
        )

    def _advance(self) -> None:
        """To the next end of an answer, a group, or a step."""
        speed, is_training = self._speed(), self._training_s is not None
        num_answers = sum(server.num_answers for server in self._servers)
        wait_s = min(server.next_end_s for server in self._servers) / speed
        if self._training_s is not None:
            wait_s = min(wait_s, self._training_s / speed)
        if self._late:
            wait_s = min(wait_s, self._late[0][0] - self._now_s)
        if not math.isfinite(wait_s):
            raise RuntimeError(f"the simulation of {self._point} stands still")
        self._now_s += wait_s
        if self._version >= NUM_SETTLING:
            self._training.add(wait_s * is_training, speed)
            self._generation.add(wait_s * num_answers, speed)
        for server in self._servers:
            for group in server.advance(wait_s * speed):
                self._left[group] -= 1
                if not self._left[group]:
                    heapq.heappush(self._late, (self._now_s + self._beside_s, group))
        while self._late and self._late[0][0] <= self._now_s + 1e-12:
            self._finish(heapq.heappop(self._late)[1])
        if self._training_s is not None:
            self._training_s -= wait_s * speed
            if self._training_s <= 1e-12:
                self._end_step()
        if self._training_s is None and self._may_form:
            self._form_batch()
        self._admit()

    def _speed(self) -> float:
        """Relative speed of all that computes, where both sides share cores; else 1."""
        if self._cores is None:
            return 1.0
        of_rank, of_worker = self._threads
        wanted = sum(of_worker for server in self._servers if server.num_answers)
        if self._training_s is not None:
            wanted += of_rank * self._point.num_train_workers
        return self._cores.speed(wanted)

    def _admit(self) -> None:
        settings = self._settings
        for _ in range(self._admission.num_admissible(self._version, self._num_admitted)):
            if len(self._open) >= settings.max_concurrent_groups:
                return
            number = self._num_ever
            self._num_ever += 1
            self._num_admitted += 1
            group = Group(number, _PROMPT, self._version, state=GroupState.running)
            self._open[number] = group, self._now_s
            self._left[number] = settings.group_size
            server = min(self._servers, key=lambda server: server.num_answers)
            for num_tokens in self._lengths.draw(self._rng, settings.group_size):
                server.add(max(1.0, num_tokens), number)

    def _finish(self, number: int) -> None:
        group, began_s = self._open.pop(number)
        group.state = GroupState.finished
        self._may_form = True
        self._finished[number] = group
        if self._version >= NUM_SETTLING:
            self._group_times.append(self._now_s - began_s)
        self._admission.note_end("", sum(server.num_waiting for server in self._servers))
        self._admission.note_finished(len(self._finished))

    def _ask(self) -> None:
        self._asked_s = self._now_s
        self._may_form = True
        self._admission.note_asked(self._version)
        self._admit()

    def _form_batch(self) -> None:
        self._may_form = False
        unconsumed = [group for group, _ in self._open.values()] + list(self._finished.values())
        decision = self._policy.form_batch(unconsumed, self._version)
        for group in decision.stale:
            self._finished.pop(group.group_id, None)
            if group.group_id in self._open:  # it goes on in its place, for nobody
                group.admitted_version = self._version
            else:
                self._num_admitted -= 1
        if decision.groups is None:
            return
        for group in decision.groups:
            del self._finished[group.group_id]
        ages = [self._version - group.admitted_version for group in decision.groups]
        self._ages.append(sum(ages) / len(ages))
        self._waits.append(self._now_s - self._asked_s)
        self._admission.note_batch(len(self._finished))
        figures = self._figures
        num_ranks = self._point.num_train_workers
        self._training_s = figures.training.seconds(num_ranks) + figures.rest_s

    def _end_step(self) -> None:
        self._training_s = None
        self._version += 1
        self._ends.append(self._now_s)
        for server in self._servers:
            if self._version > NUM_SETTLING:
                self._held_tokens.append(server.held_tokens)
            server.update(self._usual_tokens)
        self._ask()


def _scaled(config: RolloutConfig, point: OperatingPoint, part: float) -> RolloutConfig:
    """The settings that admission goes by, for a part of the servers."""
    return replace(
        config,
        max_staleness=point.max_staleness,
        total_steps=0,
        train_batch_groups=max(1, round(config.train_batch_groups * part)),
        max_concurrent_groups=max(1, round(config.max_concurrent_groups * part)),
        admission=AdmissionMode(config.admission),
    )
