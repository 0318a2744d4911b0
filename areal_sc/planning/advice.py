"""The split of the devices and the staleness bound that give the shortest step.

With r ranks, w rollout workers and the bound b, in seconds, from means over measured steps:

    training_s   = (step_s - wait_s - train_s) + train_s * ranks / r
    generation_s = answer_s / (rollout.max_running_sequences * w)
    step_s       = max(training_s, generation_s,
                       (training_s + max(generation_s, group_s)) / (b + 1))

Steps are trained beside the generation of later batches, so a step takes as long as the slower of
the two. The last term is the bound's. A group begins when the step that is b before its own begins,
at the earliest, and is trained when it has ended: b + 1 steps take as long as both together.

So all that the ranks do is taken to be divided among them, and answers to last as long however many
of them a server runs, which is nearly so while reading the weights takes most of its time. All
three are multiplied by what makes the present point as it was measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from statistics import fmean
from typing import Final

from areal_sc.config.schema import AdmissionMode, Device, GRPOConfig, RolloutConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError
from areal_sc.records.metrics import StepMetrics
from areal_sc.sizing.machine import resolved_device, this_machine

MIN_STEPS: Final = 8
"""Fewer say little: batches differ, and so do their answers."""
MAX_STEPS: Final = 60
"""The newest ones; answers get longer, or shorter, while a model learns."""


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
        """The numbers of workers that train and that generate."""
        return self.num_train_workers, self.num_rollout_workers

    @classmethod
    def of(cls, metrics: StepMetrics) -> OperatingPoint:
        return cls(metrics.num_train_workers, metrics.num_rollout_workers, metrics.max_staleness)


@dataclass(frozen=True)
class MeasuredTimes:
    """Means over steps at one operating point.

    Attributes:
        first_step, last_step: those that were looked at.
        step_s: of a step.
        wait_s: of it, in which the trainer waited for the batch.
        train_s: of it, in which the ranks trained. What is left is publication, and what the
            script does.
        busy_share: of the time, in which a server had answers to go on with.
        answer_s: that the answers of a step took on their servers, all of them together.
        group_s: from the start of a group on its worker until its rows are there.
    """

    point: OperatingPoint
    first_step: int
    last_step: int
    step_s: float
    wait_s: float
    train_s: float
    busy_share: float
    answer_s: float
    group_s: float


def measured_times(steps: Sequence[StepMetrics]) -> MeasuredTimes | None:
    """Times at the operating point of the last step.

    Returns: None: its steps are too few, or workers have not counted what they did.
    """
    if not steps:
        return None
    point = OperatingPoint.of(steps[-1])
    newest = [*takewhile(lambda step: OperatingPoint.of(step) == point, reversed(steps))]
    newest = newest[:MAX_STEPS][::-1]
    # admission settles first
    newest = newest[min(len(newest) // 2, 2 + 2 * point.max_staleness) :]
    group_times = [step.group_time_s for step in newest if step.group_time_s is not None]
    if len(newest) < MIN_STEPS or not point.num_train_workers or not group_times:
        return None
    busy, answer_s = busy_share(newest), [new_s for new_s, _ in _added(newest, "answer_s")]
    if not busy or not any(answer_s):
        return None
    return MeasuredTimes(
        point,
        first_step=newest[0].step,
        last_step=newest[-1].step,
        step_s=fmean(step.step_time_s for step in newest),
        wait_s=fmean(step.wait_s for step in newest),
        train_s=fmean(step.train_s for step in newest),
        busy_share=busy,
        answer_s=fmean(answer_s),
        group_s=fmean(group_times),
    )


def busy_share(steps: Sequence[StepMetrics]) -> float | None:
    """Share of the time after the first step in which a server had answers; None: unknown."""
    added = _added(steps, "busy_s")
    servers_s = sum(step.step_time_s * step.num_rollout_workers for _, step in added)
    return min(1.0, sum(busy_s for busy_s, _ in added) / servers_s) if servers_s else None


def _added(steps: Sequence[StepMetrics], counter: str) -> list[tuple[float, StepMetrics]]:
    """What each step but the first has added to a counter, and the step.

    Steps in which it began anew, as that of a worker that was started again, are left out.
    """
    found = []
    for before, now in pairwise(steps):
        added = now.counters.get(counter, 0.0) - before.counters.get(counter, 0.0)
        if counter in before.counters and added >= 0:
            found.append((added, now))
    return found


SUFFICES: Final = 1.02
"""A step may be longer by this factor than the shortest, if data are fresher for it."""
SPARE_BOUND: Final = 1
"""What is advised beyond the bound that suffices where nothing is disturbed. On the main job bound
1 should suffice, and steps take 5 to 7 % longer with it; with 2 they take as long as with 4."""
MIN_GAIN: Final = 0.03
"""Another split has to make a step shorter by this share: what changes nothing is not worth a
restart."""


@dataclass(frozen=True)
class Forecast:
    """What a step takes at an operating point.

    Attributes:
        training_s: of it, all that the trainer does but wait.
        generation_s: of a batch, by all rollout workers.
    """

    point: OperatingPoint
    training_s: float
    generation_s: float
    step_s: float


@dataclass(frozen=True)
class Plan:
    """What is advised, and why.

    Attributes:
        ranks_per_data: ranks of one `actor.parallel.data`.
        num_devices: that training and generation have together.
        present: as measured.
        tried: one forecast a split, with the bound that suffices; the shortest step first.
    """

    times: MeasuredTimes
    ranks_per_data: int
    num_devices: int
    present: Forecast
    advised: Forecast
    tried: Sequence[Forecast]

    @property
    def settings(self) -> str:
        """What to set, as on a command line; "" where the present point is advised."""
        new, old = self.advised.point, self.present.point
        found = []
        if new.num_train_workers != old.num_train_workers:
            found.append(f"actor.parallel.data={new.num_train_workers // self.ranks_per_data}")
        if new.num_rollout_workers != old.num_rollout_workers:
            found.append(f"rollout.num_workers={new.num_rollout_workers}")
        if new.max_staleness != old.max_staleness:
            found.append(f"rollout.max_staleness={new.max_staleness}")
        return " ".join(found)


def make_plan(
    steps: Sequence[StepMetrics], config: GRPOConfig, num_devices: int | None = None
) -> Plan | None:
    """The point that gives the shortest step, and of those that do the smallest bound.

    Args:
        num_devices: that may be used; None: as many as are used now. Where training and generation
            share devices now, or the run finds the number of its workers itself, the split then
            stays as it is.
    Returns: None: there are too few steps at the present point, or they tell too little.
    Raises: ConfigError: there have to be more devices.
    """
    times = measured_times(steps)
    if times is None:
        return None
    of_worker = make_generator(config.rollout).devices[1]
    ranks_per_data = config.actor.parallel.num_ranks // config.actor.parallel.data
    num_used = times.point.num_train_workers + of_worker * times.point.num_rollout_workers
    total = num_devices or num_used
    if num_devices is not None and total < ranks_per_data + of_worker:
        raise ConfigError(
            f"{total} devices are too few: {ranks_per_data} for training and {of_worker} for "
            "generation are the least"
        )
    splits = {times.point.split} if total >= num_used else set()
    if num_devices is not None or not (config.rollout.autoscale.max or shares_devices(config)):
        all_ranks = range(ranks_per_data, total - of_worker + 1, ranks_per_data)
        splits |= {(num_ranks, (total - num_ranks) // of_worker) for num_ranks in all_ranks}
    # with a larger bound the algorithm was not seen to learn
    most_bound = max(times.point.max_staleness, config.actor.ppo.tried_staleness)
    tried = [_with_bound(times, config.rollout, split, most_bound) for split in splits]
    tried.sort(key=lambda it: (it.step_s, it.point.split))
    present, advised = forecast(times, config.rollout, times.point), tried[0]
    own = next((it for it in tried if it.point.split == times.point.split), None)
    if own is not None and advised.step_s >= (1 - MIN_GAIN) * own.step_s:
        advised = own
    if advised is own and _suffices(present, own, config.rollout.admission):
        advised = present
    return Plan(times, ranks_per_data, total, present, advised, tried)


def forecast(times: MeasuredTimes, config: RolloutConfig, point: OperatingPoint) -> Forecast:
    """The forecast for a point."""
    present, found = (_uncorrected(times, config, it) for it in (times.point, point))
    factor = times.step_s / present.step_s
    return Forecast(
        point, factor * found.training_s, factor * found.generation_s, factor * found.step_s
    )


def _uncorrected(times: MeasuredTimes, config: RolloutConfig, point: OperatingPoint) -> Forecast:
    """By the equations alone."""
    training_s = times.step_s - times.wait_s - times.train_s
    training_s += times.train_s * times.point.num_train_workers / point.num_train_workers
    generation_s = times.answer_s / (config.max_running_sequences * point.num_rollout_workers)
    of_bound_s = (training_s + max(generation_s, times.group_s)) / (point.max_staleness + 1)
    return Forecast(point, training_s, generation_s, max(training_s, generation_s, of_bound_s))


def _with_bound(
    times: MeasuredTimes, config: RolloutConfig, split: tuple[int, int], most_bound: int
) -> Forecast:
    """The split with the smallest bound that hardly makes a step longer, and one to spare."""

    def with_bound(bound: int) -> Forecast:
        return forecast(times, config, OperatingPoint(*split, bound))

    limit_s = SUFFICES * with_bound(most_bound).step_s
    # a larger bound never makes a step longer
    bounds = range(most_bound + 1)
    least = bisect_left(bounds, True, key=lambda bound: with_bound(bound).step_s <= limit_s)
    return with_bound(min(least + SPARE_BOUND, most_bound))


def _suffices(present: Forecast, advised: Forecast, admission: AdmissionMode) -> bool:
    """Whether a change of the bound would gain nothing.

    A bound that is larger than it need be makes data staler where admission is eager alone.
    """
    spare = present.point.max_staleness - advised.point.max_staleness
    return spare == 0 or (spare > 0 and admission is AdmissionMode.just_in_time)


def shares_devices(config: GRPOConfig) -> bool:
    """Whether training and generation use the same cores or GPU, so that there is no split."""
    num_devices = this_machine().num_cuda_devices
    if config.scheduler.type != SchedulerType.local.value:
        return False
    devices = (config.actor.device, config.rollout.device)
    if all(resolved_device(device, num_devices) == Device.cpu for device in devices):
        return True
    actor, generator = make_actor(config.actor), make_generator(config.rollout)
    wanted = actor.num_workers + generator.num_workers * generator.devices[1]
    return 0 < num_devices < wanted
