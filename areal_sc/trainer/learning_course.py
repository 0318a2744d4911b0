"""How a run's learning has gone: means over its steps and evaluations, each with its error.

The error of a reward is the larger one of two: that of a batch, by its prompts and their answers,
and what the steps themselves show from one to the next. So a number says how far it can be trusted
also where a run tells little of itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from areal_sc.records.metrics import EvaluationResult, StepMetrics

NUM_STEPS: Final = 10
"""Steps that a mean is over: fewer are noise, and more are told late."""

MAX_STANDING: Final = 100
"""Steps without a rise that are enough, however long the run is."""

SOLVED_ACCURACY: Final = 0.9
"""Mean accuracy from which on missing signal and entropy are success."""

LOST_SPREAD: Final = 0.1
"""Share of the rewards' first variance below which prompts earn the same by now."""

_ADDED: Final = 4
"""Answers, half of them right, that are added to an evaluation: an accuracy of 0 has an error, too
(Agresti and Coull, "Approximate Is Better than Exact", The American Statistician 52, 1998)."""


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error."""

    value: float
    error: float

    def __sub__(self, other: Measured) -> Measured:
        return Measured(self.value - other.value, math.hypot(self.error, other.error))

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.error:.1g}"

    def is_above(self, limit: float, num_errors: float) -> bool:
        """By so many of its errors."""
        return self.value - num_errors * self.error > limit

    def is_below(self, limit: float, num_errors: float) -> bool:
        """By so many of its errors."""
        return self.value + num_errors * self.error < limit


@dataclass(frozen=True)
class Evaluated:
    """An evaluation beside the training that it was made in.

    Attributes:
        score: accuracy, or reward where there is none.
        trained: the same of the newest training steps at its time.
    """

    score: Measured
    trained: Measured


@dataclass(frozen=True)
class _Result:
    """What an evaluation gave; `is_share`: it is an accuracy."""

    value: float
    is_share: bool
    num_prompts: int
    trained: Measured


class Course:
    """What the rules see of a run.

    Attributes:
        num_steps: recorded ones.
        first, newest: up to `NUM_STEPS` steps, in their order.
        recent: the newest ones, up to `NUM_STEPS` more than `MAX_STANDING`.
        most_signal: the highest mean of `signal` over `NUM_STEPS` steps.
        best_reward: the highest mean over `NUM_STEPS` steps.
        widest_kl: the largest mean of `proximal_kl` over the steps of `NUM_STEPS` that have it.
        reach: how much all steps together can have raised the mean reward, at most, in standard
            deviations of an answer's reward.
        num_moves: steps of which `reach` knows.
        mean_lr: over the run's steps.
        entropies: of the newest steps that have one.
        variance: of the rewards of the whole run.
        max_mismatch: how far trainer and sampler may differ, in units of the measured noise.
    """

    def __init__(self, max_mismatch: float) -> None:
        self.max_mismatch = max_mismatch
        self.num_steps = 0
        self.first: list[StepMetrics] = []
        self.newest: deque[StepMetrics] = deque(maxlen=NUM_STEPS)
        self.recent: deque[StepMetrics] = deque(maxlen=MAX_STANDING + NUM_STEPS)
        self.most_signal = 0.0
        self.best_reward = Measured(-math.inf, 0.0)
        self.widest_kl = 0.0
        self.reach = 0.0
        self.num_moves = 0
        self.mean_lr = math.nan
        self.entropies: deque[float] = deque(maxlen=NUM_STEPS)
        self._results: dict[str, list[_Result]] = {}
        self._largest_std = 0.0  # of answers' rewards
        self._num_lrs = 0
        self._squared_changes = 0.0
        self.variance = _RewardVariance()

    def add_step(self, metrics: StepMetrics) -> None:
        self.num_steps += 1
        if self.newest:
            self._squared_changes += (metrics.reward - self.newest[-1].reward) ** 2
        if len(self.first) < NUM_STEPS:
            self.first.append(metrics)
        self.newest.append(metrics)
        self.recent.append(metrics)
        self.variance.add(metrics)
        if not math.isnan(entropy := number(metrics.train.get("entropy"))):
            self.entropies.append(entropy)
        if (moved := _largest_gain(metrics)) is not None:
            self.reach += moved
            self.num_moves += 1
        if not math.isnan(lr := number(metrics.train.get("lr"))):
            self._num_lrs += 1
            before = 0.0 if math.isnan(self.mean_lr) else self.mean_lr
            self.mean_lr = before + (lr - before) / self._num_lrs
        if (std := self.reward_std()) > self._largest_std:
            self._largest_std = std
        if len(self.newest) == NUM_STEPS:
            self.best_reward = max(self.best_reward, self.reward(), key=lambda it: it.value)
            self.widest_kl = max(self.widest_kl, self.kl())
            self.most_signal = max(self.most_signal, self.signal())  # NaN: the first one stays

    def add_evaluation(self, result: EvaluationResult) -> None:
        """Greedy ones are others than those before, and are not compared with them."""
        if not result.temperature:
            return
        family, score = result.name.rpartition("/")[0], result.accuracy
        if score is None:
            found = _Result(result.reward, False, result.num_prompts, self.reward())
        else:
            found = _Result(score, True, result.num_prompts, self.accuracy())
        self._results.setdefault(family, []).append(found)

    def evaluations(self) -> Mapping[str, Sequence[Evaluated]]:
        """Those that sample, in their order, by what stands before the slash of their names."""
        return {
            family: [Evaluated(self._measured(it), it.trained) for it in results]
            for family, results in self._results.items()
        }

    def _measured(self, result: _Result) -> Measured:
        """Of a reward: as much as the answers have differed in training at most, where they may be
        the same by now. Answers to a prompt are alike."""
        size = result.num_prompts
        if not result.is_share:
            return Measured(result.value, self._largest_std / math.sqrt(size))
        added = (result.value * size + _ADDED / 2) / (size + _ADDED)
        return Measured(result.value, _std_of_share(added) / math.sqrt(size + _ADDED))

    def reward(self, steps: Sequence[StepMetrics] | None = None) -> Measured:
        """Of some steps, by default of the newest ones."""
        steps = self.newest if steps is None else steps
        if not steps:
            return Measured(math.nan, math.nan)
        # half the mean square of changes is the variance of a step, whatever the trend
        changes = self._squared_changes / max(1, self.num_steps - 1) / 2
        of_batches = fmean(_variance_of_mean(it) for it in steps)
        value = fmean(it.reward for it in steps)
        return Measured(value, math.sqrt(max(changes, of_batches) / len(steps)))

    def accuracy(self, steps: Sequence[StepMetrics] | None = None) -> Measured:
        """Of some steps, by default of the newest ones; NaN: the workflow reports none."""
        steps = self.newest if steps is None else steps
        value = mean(steps, lambda it: number(it.accuracy))
        drawn = sum(it.num_groups or it.num_rows for it in steps)
        return Measured(value, _std_of_share(value) / math.sqrt(drawn) if drawn else math.nan)

    def rise(self) -> Measured:
        """Of the reward, from the first steps to the newest."""
        return self.reward() - self.reward(self.first)

    def rise_of_late(self, num_steps: int = NUM_STEPS) -> Measured:
        """Of the reward, from the `NUM_STEPS` steps before the newest `num_steps` to these."""
        steps = [*self.recent]
        before, since = steps[:-num_steps], steps[-num_steps:]
        return self.reward(since) - self.reward(before[-NUM_STEPS:])

    def rises(self) -> bool:
        """Whether the newest mean reward is above all of the first steps."""
        return self.reward().value > max(it.reward for it in self.first)

    def kl(self) -> float:
        """Mean over the newest steps that had tokens with signal; a ruined policy has none."""
        kl = mean(self.newest, lambda it: number(it.train.get("proximal_kl")))
        return 0.0 if math.isnan(kl) else kl

    def signal(self, steps: Iterable[StepMetrics] | None = None) -> float:
        """Share of the prompts whose answers differ in reward; NaN: prompts have one answer."""
        steps = self.newest if steps is None else steps
        return mean(steps, lambda it: math.nan if _is_alone(it) else number(it.signal_share))

    def is_alone(self) -> bool:
        """Whether every prompt of the newest steps had one answer."""
        return all(map(_is_alone, self.newest))

    def is_solved(self) -> bool:
        """Whether there is little left to learn; without an accuracy: whether it has learned."""
        accuracy = self.accuracy().value
        return self.rises() if math.isnan(accuracy) else accuracy >= SOLVED_ACCURACY

    def reward_std(self) -> float:
        """Of an answer's reward, in the newest steps."""
        known = mean(self.newest, lambda it: number(it.reward_std))
        if not math.isnan(known):
            return known
        rows = fmean(it.num_rows for it in self.newest)
        return self.reward().error * math.sqrt(NUM_STEPS * rows)

    def differs_by_prompt(self) -> bool:
        """Whether rewards of the newest steps differ between prompts more than within them."""
        parts = [
            (number(it.reward_std) ** 2, number(it.reward_std_in_groups) ** 2) for it in self.newest
        ]
        known = [part for part in parts if not any(map(math.isnan, part))]
        if known:
            whole, within = map(sum, zip(*known, strict=True))
            return within < whole / 2
        return self.reward().value == self.accuracy().value

    def has_lost_spread(self) -> bool:
        """Whether rewards of all answers differ far less than at first."""
        before, now = (
            mean(of, lambda it: number(it.reward_std) ** 2) for of in (self.first, self.newest)
        )
        return now < LOST_SPREAD * before


class _RewardVariance:
    """Sums up how much rewards differ, between the answers to a prompt and between prompts."""

    def __init__(self) -> None:
        self._whole = self._within = 0.0
        self._num_groups = self._num_answers = 0

    def add(self, metrics: StepMetrics) -> None:
        if metrics.reward_std is None or metrics.reward_std_in_groups is None:
            return
        self._whole += metrics.num_rows * metrics.reward_std**2
        self._within += metrics.num_rows * metrics.reward_std_in_groups**2
        self._num_groups += metrics.num_groups
        self._num_answers += metrics.num_rows

    def prompts_share(self) -> Measured:
        """The intraclass correlation; its error is that of the ratio of two variances."""
        freedom = self._num_answers - self._num_groups
        if not self._whole or freedom <= 0:
            return Measured(math.nan, math.nan)
        a_group = self._num_answers / self._num_groups
        error = math.sqrt(2 / self._num_groups + 2 / freedom) / a_group
        return Measured(1 - self._within / self._whole, error)


def _largest_gain(metrics: StepMetrics) -> float | None:
    """How much a step can have raised the mean reward, in standard deviations of a reward.

    E_q[R] - E_p[R] <= std_p(R) sqrt(chi2(q, p)), and chi2 is 2 KL for small steps, that of an
    answer the sum over its tokens. `proximal_kl` is a mean over the minibatches, of which the
    first has moved nothing yet; n equal moves end n^2 / mean(0, 1, 4, ..., (n - 1)^2) times as far.

    Returns: None: it is not known, as with one update a step.
    """
    kl = number(metrics.train.get("proximal_kl"))
    num = round(number(metrics.train.get("num_updates", 2)))
    if not kl > 0 or num < 2:
        return None
    whole = kl * 6 * num**2 / ((num - 1) * (2 * num - 1))
    return math.sqrt(2 * whole * max(1.0, metrics.answer_tokens))


def _variance_of_mean(metrics: StepMetrics) -> float:
    """Of a step's mean reward, by the prompts and answers of its batch; 0: it is not known."""
    if metrics.reward_std is None or not metrics.num_groups:
        return 0.0
    whole, within = metrics.reward_std**2, (metrics.reward_std_in_groups or 0.0) ** 2
    between = max(0.0, whole - within)
    return between / metrics.num_groups + within / metrics.num_rows


def _std_of_share(share: float) -> float:
    """Of what is 0 or 1: nothing else between them differs by more."""
    return math.sqrt(max(0.0, share * (1 - share)))


def _is_alone(metrics: StepMetrics) -> bool:
    # records of an earlier areal_sc do not tell how many groups there were
    return 0 < (metrics.num_groups or metrics.num_rows) == metrics.num_one_episode_groups


def mean(steps: Iterable[StepMetrics], of: Callable[[StepMetrics], float]) -> float:
    """Over the steps in which it was measured; NaN: in none."""
    measured = [value for value in map(of, steps) if not math.isnan(value)]
    return fmean(measured) if measured else math.nan


def number(value: float | None) -> float:
    """NaN in place of None: not measured, or no number in the record of an earlier start."""
    return math.nan if value is None else value
