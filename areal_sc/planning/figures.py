"""What the steps of a run tell of its costs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import combinations, pairwise
from typing import Final

from areal_sc.config.schema import GRPOConfig
from areal_sc.engines.busy_time import TurnSums
from areal_sc.records.metrics import StepMetrics

MIN_STEPS: Final = 8
"""Fewer say little: batches differ, and so do their answers."""
MAX_STEPS: Final = 60
"""The newest ones; answers get longer, or shorter, while a model learns."""
DIVIDED_SHARE: Final = 0.9
"""Share of a training step's time that is divided among the ranks; assumed where a run does not
tell. A trainer that is well used spends little on what does not depend on tokens."""
DIVIDED_STD: Final = 0.15
"""How far it may be out."""
NORMAL_MAD: Final = 1.4826
"""Standard deviation of normal numbers, in their median distance from their median."""
_TURN_SUMS: Final = tuple(item.name for item in fields(TurnSums))
PRIOR_SPREAD: Final = 0.03
"""How far numbers of running answers have to differ, as a share of them, before the times of turns
with many and with few say more than what is assumed of them."""


@dataclass(frozen=True)
class OperatingPoint:
    """What a user chooses.

    Attributes:
        num_train_workers: ranks (`actor.parallel`).
        num_rollout_workers: `rollout.num_workers`.
        max_staleness: `rollout.max_staleness`.
    """

    num_train_workers: int
    num_rollout_workers: int
    max_staleness: int

    @property
    def split(self) -> tuple[int, int]:
        """The split of the workers into training and generation."""
        return self.num_train_workers, self.num_rollout_workers

    @classmethod
    def of(cls, metrics: StepMetrics) -> OperatingPoint:
        return cls(metrics.num_train_workers, metrics.num_rollout_workers, metrics.max_staleness)


@dataclass(frozen=True)
class Turn:
    """What one turn takes, in which each running answer of a server gets one token.

    Attributes:
        fixed_s: whatever their number: reading the weights, say.
        per_answer_s: for each of them.
    """

    fixed_s: float
    per_answer_s: float

    def seconds(self, num_running: int) -> float:
        return self.fixed_s + self.per_answer_s * num_running


@dataclass(frozen=True)
class Training:
    """What the training of a step takes: `fixed_s + divided_s / num_ranks`.

    Attributes:
        fixed_s: however many tokens and ranks there are: calls of workers, the start of each
            minibatch, the optimizer.
        divided_s: passes over the tokens, by all ranks together.
        std_s: standard error of `fixed_s`.
    """

    fixed_s: float
    divided_s: float
    std_s: float

    def seconds(self, num_ranks: int) -> float:
        return self.fixed_s + self.divided_s / num_ranks


@dataclass(frozen=True)
class Figures:
    """Means over steps at one operating point.

    Attributes:
        first_step, last_step: those that were looked at.
        step_s, wait_s: of a step.
        rest_s: publication, and what the script does.
        group_s: from the start of a group on its worker until its rows are there.
        prompt_tokens, mean_tokens: of a prompt, and of an answer.
        longest_tokens, longest_std, longest_max: of the longest answer of a group.
        busy_share: of the time of the servers.
        num_running: answers of a server at one time, as a token has it.
        update_s: that new weights stop a server, each time.
        recompute_s, recomputed_tokens: that it then spends on keys and values of its answers, and
            of how many tokens.
    """

    point: OperatingPoint
    first_step: int
    last_step: int
    step_s: float
    wait_s: float
    training: Training
    rest_s: float
    group_s: float
    prompt_tokens: float
    mean_tokens: float
    longest_tokens: float
    longest_std: float
    longest_max: float
    busy_share: float
    num_running: float
    turn: Turn
    update_s: float
    recompute_s: float
    recomputed_tokens: float

    @property
    def num_steps(self) -> int:
        return self.last_step - self.first_step + 1


def newest_figures(steps: Sequence[StepMetrics], config: GRPOConfig) -> Figures | None:
    """Figures of the present operating point; None: its steps are too few, or tell too little."""
    found = all_figures(steps, config)
    if not found or not steps or found[-1].point != OperatingPoint.of(steps[-1]):
        return None
    return found[-1]


def all_figures(steps: Sequence[StepMetrics], config: GRPOConfig) -> list[Figures]:
    """Figures of each operating point that the run has had for long enough, in their order."""
    parts: list[list[StepMetrics]] = []
    for metrics in steps:
        if not parts or OperatingPoint.of(parts[-1][-1]) != OperatingPoint.of(metrics):
            parts.append([])
        parts[-1].append(metrics)
    found = (_figures_of(part, config) for part in parts)
    return [figures for figures in found if figures is not None]


def _figures_of(part: Sequence[StepMetrics], config: GRPOConfig) -> Figures | None:
    point = OperatingPoint.of(part[-1])
    part = part[-MAX_STEPS:]
    # admission settles first
    steps = part[min(len(part) // 2, 2 + 2 * point.max_staleness) :]
    if len(steps) < MIN_STEPS or not point.num_train_workers or not point.num_rollout_workers:
        return None
    turns, counted = TurnSums(**_new(part, _TURN_SUMS)), _new(steps, ("busy_s",))
    times = [step.group_time_s for step in steps if step.group_time_s is not None]
    if not times or turns.turn_tokens <= 0 or counted["busy_s"] <= 0:
        return None

    def mean(name: str) -> float:
        return statistics.fmean(getattr(step, name) for step in steps)

    step_s, wait_s, train_s = mean("step_time_s"), mean("wait_s"), mean("train_s")
    longest = mean("longest_tokens_mean")
    mean_tokens = statistics.fmean(
        (step.num_trained_tokens + step.num_masked_tokens) / step.num_rows for step in steps
    )
    # not all engines count them
    loads = _new(part, ("weight_updates", "update_stall_s"))
    recomputed = _new(part, ("recompute_s", "recomputed_tokens"))
    num_loads = max(1.0, loads["weight_updates"])
    return Figures(
        point,
        first_step=steps[0].step,
        last_step=steps[-1].step,
        step_s=step_s,
        wait_s=wait_s,
        training=_fit_training(steps, point.num_train_workers),
        rest_s=max(0.0, step_s - wait_s - train_s),
        group_s=statistics.fmean(times),
        prompt_tokens=max(0.0, mean("mean_sequence_length") - mean_tokens),
        mean_tokens=max(1.0, min(mean_tokens, longest)),
        longest_tokens=max(1.0, longest),
        longest_std=mean("longest_tokens_std"),
        longest_max=max(1, *(step.longest_tokens_max for step in steps)),
        busy_share=counted["busy_s"] / ((len(steps) - 1) * step_s * point.num_rollout_workers),
        num_running=turns.turn_answers / turns.turn_tokens,
        turn=_fit(turns),
        update_s=loads["update_stall_s"] / num_loads,
        recompute_s=recomputed["recompute_s"] / num_loads,
        recomputed_tokens=recomputed["recomputed_tokens"] / num_loads,
    )


def _new(steps: Sequence[StepMetrics], names: Sequence[str]) -> dict[str, float]:
    """What was counted between the first step's end and the last one's.

    Nothing where workers have told nothing, or counted anew; counters of a step are as old as the
    workers' last beats.
    """
    sums = dict.fromkeys(names, 0.0)
    for before, now in pairwise(steps):
        new = {n: now.counters.get(n, 0.0) - before.counters.get(n, 0.0) for n in names}
        if all(name in before.counters and new[name] >= 0 for name in names):
            sums = {name: sums[name] + new[name] for name in names}
    return sums


def _fit_training(steps: Sequence[StepMetrics], num_ranks: int) -> Training:
    """What grows with the tokens of a step is what ranks share; the rest is fixed.

    A line through the times of steps by their tokens: the median of its slopes between any two
    steps (Theil and Sen), which a few odd steps do not change. The less the tokens differ, and
    the more the times do otherwise, the less the line says, and the more it is mixed with what is
    assumed, as two measurements by their variances.
    """
    times = [step.train_s for step in steps]
    tokens = [step.num_rows * step.mean_sequence_length for step in steps]
    mean_s = statistics.fmean(times)
    share, variance = DIVIDED_SHARE, DIVIDED_STD**2
    spread = statistics.pstdev(tokens)
    if spread > 0 and mean_s > 0:
        slope = statistics.median(
            (times[i] - times[j]) / (tokens[i] - tokens[j])
            for i, j in combinations(range(len(steps)), 2)
            if tokens[i] != tokens[j]
        )
        off = [seconds - slope * num for seconds, num in zip(times, tokens, strict=True)]
        middle = statistics.median(off)
        std_s = NORMAL_MAD * statistics.median(abs(x - middle) for x in off)
        scale = statistics.fmean(tokens) / mean_s
        of_line = (std_s / spread * scale) ** 2 / len(steps)
        share += (slope * scale - share) * variance / (variance + of_line)
        variance *= of_line / (variance + of_line)
    share = min(max(0.0, share), 1.0)
    return Training((1 - share) * mean_s, share * mean_s * num_ranks, mean_s * math.sqrt(variance))


def _fit(sums: TurnSums) -> Turn:
    """A line through the times of turns, by the number of answers that ran; least squares.

    Where these numbers hardly differ it is assumed that half of a turn does not depend on them.
    """
    total = sums.turn_tokens
    number, seconds = sums.turn_answers / total, sums.turn_s / total
    spread = max(0.0, sums.turn_answers2 / total - number**2)
    together = sums.turn_answers_s / total - number * seconds
    strength = (PRIOR_SPREAD * number) ** 2
    slope = (together + strength * seconds / (2 * number)) / (spread + strength)
    slope = min(max(0.0, slope), seconds / number)
    return Turn(seconds - slope * number, slope)
