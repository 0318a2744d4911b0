"""The operating point that a run should have: the split of devices, the bound that suffices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from areal_sc.config.schema import GRPOConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError
from areal_sc.planning.cores import SharedCores
from areal_sc.planning.figures import (
    Figures,
    OperatingPoint,
    all_figures,
    newest_figures,
)
from areal_sc.planning.forecast import Forecaster
from areal_sc.planning.simulated_run import Forecast
from areal_sc.records.metrics import StepMetrics
from areal_sc.sizing.machine import this_machine

SUFFICES: Final = 1.02
"""A step may be longer by this factor than the shortest, if data are fresher for it."""
SPARE_BOUND: Final = 1
"""What is advised beyond the bound that suffices where nothing is disturbed. On the main job bound
1 should suffice, and steps take 5 to 7 % longer with it; with 2 they take as long as with 4."""
MIN_GAIN: Final = 0.03
"""Another split has to make a step shorter by this share: forecasts of it are worse than those of
the present one, and what changes nothing is not worth a restart."""
MAX_EARLIER: Final = 4
"""The newest earlier operating points whose forecasts are judged."""
NUM_LOOKS: Final = 6
"""Splits are narrowed down by so many a time."""


@dataclass(frozen=True)
class EarlierForecast:
    """What the steps at another point forecast for the present one, and what was measured then."""

    source: Figures
    forecast: Forecast
    measured_s: float

    @property
    def error(self) -> float:
        """Relative error of the forecast: its excess over what was measured, as a share of that."""
        return self.forecast.step_s / self.measured_s - 1


@dataclass(frozen=True)
class Plan:
    """What is advised, and why.

    Attributes:
        ranks_per_data: ranks of one `actor.parallel.data`.
        num_devices: that training and generation have together.
        present, advised: forecasts; `present` is as measured.
        tried: all that were compared, the shortest step first.
        earlier: forecasts that can be judged by now.
        error: of the simulation at the present point, before it was corrected by that.
        fewer_data: an `actor.parallel.data` that is worth a try although it cannot be forecast:
            with it, ranks have cores of their own. None: they have, or there are no fewer.
    """

    figures: Figures
    ranks_per_data: int
    num_devices: int
    present: Forecast
    advised: Forecast
    tried: Sequence[Forecast]
    earlier: Sequence[EarlierForecast]
    error: float
    fewer_data: int | None

    @property
    def hint(self) -> str:
        """What is worth a try although it cannot be forecast; "" if nothing is."""
        if self.fewer_data is None:
            return ""
        return (
            f"try actor.parallel.data={self.fewer_data}: ranks share cores here, so that a step "
            "with fewer of them may be shorter; no forecast of it can be made"
        )

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

    @property
    def saved_share(self) -> float:
        """Share of a step's time that the advised point saves."""
        return 1 - self.advised.step_s / self.present.step_s


def make_plan(
    steps: Sequence[StepMetrics],
    config: GRPOConfig,
    num_devices: int | None = None,
    *,
    cores: SharedCores | None,
) -> Plan | None:
    """The point that gives the shortest step, and of those that do the freshest data.

    Args:
        num_devices: that may be used; None: as many as are used now.
        cores: as of `shared_cores`.
    Returns: None: there are too few steps at the present point, or they tell too little.
    Raises: ConfigError: there have to be more devices.
    """
    figures = newest_figures(steps, config)
    if figures is None:
        return None
    forecaster = Forecaster(figures, config, cores)
    present = forecaster.at(figures.point)
    num_cores = None if cores is None else cores.number
    splits = _Splits.of(config, figures.point, num_devices, num_cores)
    tried = _tried(forecaster, splits)
    advised = _advised(forecaster, tried, present, splits.most_bound)
    return Plan(
        figures,
        splits.ranks_per_data,
        splits.num_devices,
        present,
        advised,
        tried,
        _earlier(steps, config, figures, cores),
        forecaster.error,
        _fewer_data(config, figures.point, splits.ranks_per_data, num_cores),
    )


@dataclass(frozen=True)
class _Splits:
    """Which numbers of ranks and of workers may be tried.

    Attributes:
        num_devices: that there are for both.
        num_used: that the present point has.
        of_worker: devices that a rollout worker has.
        num_cores: as of `cores_of`: the number of ranks stays.
        is_fixed: there is one split alone.
        most_bound: the largest bound that may be advised.
    """

    present: OperatingPoint
    num_devices: int
    num_used: int
    of_worker: int
    ranks_per_data: int
    num_cores: int | None
    is_fixed: bool
    most_bound: int

    @classmethod
    def of(
        cls,
        config: GRPOConfig,
        present: OperatingPoint,
        num_devices: int | None,
        num_cores: int | None,
    ) -> _Splits:
        """Raises: ConfigError: there have to be more devices."""
        of_worker = make_generator(config.rollout).devices[1]
        ranks_per_data = config.actor.parallel.num_ranks // config.actor.parallel.data
        num_used = present.num_train_workers + of_worker * present.num_rollout_workers
        total = num_devices or num_used
        # more ranks on the same cores gain nothing that can be foreseen, nor fewer
        num_ranks = ranks_per_data if num_cores is None else present.num_train_workers
        if total < num_ranks + of_worker:
            raise ConfigError(
                f"{total} devices are too few: {num_ranks} for training and {of_worker} for "
                "generation are the least"
            )
        # where the run finds its number of workers itself there is nothing to set
        is_fixed = num_devices is None and (
            bool(config.rollout.autoscale.max) or (num_cores is None and shares_devices(config))
        )
        most_bound = max(present.max_staleness, config.actor.ppo.tried_staleness)
        return cls(
            present, total, num_used, of_worker, ranks_per_data, num_cores, is_fixed, most_bound
        )

    def forecasts(self, forecaster: Forecaster, bound: int) -> list[Forecast]:
        """Forecasts of splits with that bound, the best among them; none for a fixed split."""
        if self.is_fixed:
            return []
        if self.num_cores is not None:
            num_ranks = self.present.num_train_workers
            most_workers = min(self.num_devices - num_ranks, self.num_cores)
            points = (
                OperatingPoint(num_ranks, number, bound) for number in range(1, most_workers + 1)
            )
            return [forecaster.at(point) for point in points]

        def of_split(num_ranks: int) -> Forecast:
            num_workers = (self.num_devices - num_ranks) // self.of_worker
            return forecaster.at(OperatingPoint(num_ranks, num_workers, bound))

        most_ranks = self.num_devices - self.of_worker
        return _searched(of_split, range(self.ranks_per_data, most_ranks + 1, self.ranks_per_data))


def _tried(forecaster: Forecaster, splits: _Splits) -> list[Forecast]:
    """Splits with a bound that holds up none of them, and the best one with all smaller bounds.

    Returns: the shortest step first; without the present point if that has too many devices.
    """
    present = forecaster.at(splits.present)
    tried = [present] if splits.num_devices >= splits.num_used else []
    bound, ample = -1, max(_ample_bound(present), splits.present.max_staleness)
    while (ample := min(ample, splits.most_bound)) > bound:
        bound = ample
        tried += splits.forecasts(forecaster, bound)
        # another split may have so short steps that a group takes more of them
        best = _best_split(tried, present)
        ample = _ample_bound(best)
    most = max(math.ceil(best.group_s / best.step_s) + 1, splits.present.max_staleness)
    most = min(most, splits.most_bound)
    tried += [forecaster.at(replace(best.point, max_staleness=bound)) for bound in range(most + 1)]
    return sorted(set(tried), key=_step_s)


def _advised(
    forecaster: Forecaster, tried: Sequence[Forecast], present: Forecast, most_bound: int
) -> Forecast:
    """Little more than the smallest bound with a step that is hardly longer than the shortest one.

    Args:
        tried: the shortest step first.
        most_bound: as of `_Splits`.
    """
    best = _best_split(tried, present)
    limit_s = SUFFICES * best.step_s
    least = min(
        (it for it in tried if it.point.split == best.point.split and it.step_s <= limit_s),
        key=lambda forecast: (forecast.point.max_staleness, forecast.step_s),
    )
    bound = min(least.point.max_staleness + SPARE_BOUND, most_bound)
    with_spare = forecaster.at(replace(least.point, max_staleness=bound))
    suffices = present in tried and present.step_s <= limit_s
    suffices &= present.point.max_staleness >= bound
    is_as_fresh = present.staleness <= with_spare.staleness + 0.1
    return present if suffices and is_as_fresh else with_spare  # no change without a gain


def _best_split(tried: Sequence[Forecast], present: Forecast) -> Forecast:
    """The shortest step of the split that it is worth to have; the present one, if there is none.

    Args:
        tried: not those of a split that has too many devices.
    """
    best = min(tried, key=_step_s, default=present)
    as_now = [it for it in tried if it.point.split == present.point.split]
    own = min(as_now, key=_step_s, default=best)
    return best if best.step_s < (1 - MIN_GAIN) * own.step_s else own


def _step_s(forecast: Forecast) -> float:
    return forecast.step_s


def _ample_bound(forecast: Forecast) -> int:
    """Nobody waits for a group that takes so many steps, even if they were half as long."""
    return 2 * math.ceil(forecast.group_s / forecast.step_s) + 1


def _fewer_data(
    config: GRPOConfig, point: OperatingPoint, ranks_per_data: int, num_cores: int | None
) -> int | None:
    """See `Plan`.

    A rank that waits for another one's core counts as training, so the steps do not tell what
    fewer ranks would take.
    """
    if num_cores is None:
        return None
    free = num_cores - config.rollout.num_threads * point.num_rollout_workers
    data = max(1, free // ((config.actor.num_threads or 1) * ranks_per_data))
    return data if data * ranks_per_data < point.num_train_workers else None


def shares_devices(config: GRPOConfig) -> bool:
    """Whether training and generation use the same GPU, so that there is nothing to split."""
    machine = this_machine()
    if config.scheduler.type != SchedulerType.local.value or not machine.num_cuda_devices:
        return False
    actor, generator = make_actor(config.actor), make_generator(config.rollout)
    wanted = actor.num_workers + generator.num_workers * generator.devices[1]
    return wanted > machine.num_cuda_devices


def _searched(of_split: Callable[[int], Forecast], numbers: Sequence[int]) -> list[Forecast]:
    """Forecasts of some of the numbers, ever closer to the one with the shortest step.

    A step gets shorter with more ranks as long as training is the bound, and longer from there on.
    """
    found: dict[int, Forecast] = {}
    first, last = 0, len(numbers) - 1
    while first <= last:
        stride = max(1, (last - first) // NUM_LOOKS)
        for index in {*range(first, last + 1, stride), last}:
            if index not in found:
                found[index] = of_split(numbers[index])
        if stride == 1:
            break
        best = min(found, key=lambda index: found[index].step_s)
        first, last = max(0, best - stride + 1), min(len(numbers) - 1, best + stride - 1)
    return list(found.values())


def _earlier(
    steps: Sequence[StepMetrics],
    config: GRPOConfig,
    figures: Figures,
    cores: SharedCores | None,
) -> list[EarlierForecast]:
    found = [f for f in all_figures(steps, config) if f.point != figures.point][-MAX_EARLIER:]
    return [
        EarlierForecast(source, Forecaster(source, config, cores).at(figures.point), figures.step_s)
        for source in found
    ]
