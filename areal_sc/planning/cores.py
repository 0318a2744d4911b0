"""Cores that training and generation share."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median
from threading import Barrier
from typing import Final, NamedTuple

import numpy as np

from areal_sc.config.schema import Device, GRPOConfig
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.sizing.machine import resolved_device, this_machine
from areal_sc.system.cgroups import num_cores

TRIAL_S: Final = 0.03
NUM_TRIALS: Final = 9
MAX_WAIT_S: Final = 60.0
"""For all threads of a trial to begin."""
MAX_THREADS: Final = 8
"""With more of them it is not tried out; memory is as busy as it can be with these."""
CACHED_VALUES: Final = 1 << 16
"""Number of values in an array that a core's own cache holds."""
LARGE_VALUES: Final = 1 << 22
"""Number of values in an array that a core's own cache does not hold."""


@dataclass(frozen=True)
class SharedCores:
    """What threads have of a machine that all compute on.

    Attributes:
        number: of cores, as the system counts them, within the quota of a container.
        together: speed of a thread while all cores compute, in that of one alone. What the system
            calls a core is often half of one, and clocks and caches are shared, too.
        free_share: of their time that other processes did not want when that was tried out.
    """

    number: int
    together: float = 1.0
    free_share: float = 1.0

    def speed(self, num_threads: int) -> float:
        """Speed of each of `num_threads` concurrent threads, relative to one alone."""
        if num_threads <= 1:
            return 1.0
        if num_threads > self.number:
            return self.together * self.number / num_threads
        return 1.0 - (1.0 - self.together) * (num_threads - 1) / (self.number - 1)


def cores_of(config: GRPOConfig) -> int | None:
    """How many cores training and generation share; None: they have devices of their own."""
    num_devices = this_machine().num_cuda_devices
    devices = (config.actor.device, config.rollout.device)
    is_on_cpu = all(resolved_device(device, num_devices) == Device.cpu for device in devices)
    is_here = config.scheduler.type == SchedulerType.local.value
    return num_cores() if is_on_cpu and is_here else None


def shared_cores(config: GRPOConfig) -> SharedCores | None:
    """The cores that `cores_of` counts; how fast they are together is tried out for a second."""
    number = cores_of(config)
    return None if number is None else _tried_out(number)


def _tried_out(number: int) -> SharedCores:
    """Half of the time is taken to go to arithmetic, and half to memory.

    Models of a size that is trained on CPUs do about that, and memory is what cores share.
    """
    num_threads, slowness, free = min(number, MAX_THREADS), 0.0, list[float]()
    with ThreadPoolExecutor(num_threads) as threads:
        for size, operation in ((CACHED_VALUES, np.exp), (LARGE_VALUES, np.negative)):
            ratios = []
            for _ in range(NUM_TRIALS):
                alone = _rounds(threads, 1, size, operation)
                together = _rounds(threads, num_threads, size, operation)
                ratios.append(together.per_s / alone.per_s)
                free.append(together.free_share)
            slowness += 0.5 / min(1.0, median(ratios))
    return SharedCores(number, 1 / slowness, median(free))


class _Rounds(NamedTuple):
    """Means over threads: rounds in a second of their own time, and its share of the time."""

    per_s: float
    free_share: float


def _rounds(threads: ThreadPoolExecutor, number: int, size: int, operation: np.ufunc) -> _Rounds:
    """How often so many values are computed, by threads that begin at once.

    Python's lock is hardly needed for it. Time in which other processes have the core does not
    count.
    """
    gate = Barrier(number)

    def count() -> tuple[float, float]:
        values, rounds = np.linspace(-1.0, 1.0, size, dtype=np.float32), 0
        result = np.empty_like(values)
        gate.wait(MAX_WAIT_S)
        begun_s, own_begun_s = time.perf_counter(), time.thread_time()
        passed_s = 0.0
        while passed_s < TRIAL_S:  # a round at least: the core may be taken for all of that time
            operation(values, out=result)
            rounds += 1
            passed_s = time.perf_counter() - begun_s
        own_s = time.thread_time() - own_begun_s
        return rounds / own_s, min(1.0, own_s / passed_s)

    counted = [it.result() for it in [threads.submit(count) for _ in range(number)]]
    return _Rounds(*(fmean(values) for values in zip(*counted, strict=True)))
