"""Replaces the weights of some servers, all at once or a few at a time.

For each wave of servers: wait for their running answers if that is asked for, pause, load, name
the version, go on. A server that fails anywhere on the way is given up, and whoever watches it
starts it again with the weights of then; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields

from areal_sc.config.schema import OnWeightUpdate
from areal_sc.engines.servers.sglang.dispatch import Dispatcher
from areal_sc.engines.servers.sglang.replica import Replica
from areal_sc.engines.servers.sglang.weights import LoadableWeights, for_each
from areal_sc.errors import ArealError

logger = logging.getLogger(__name__)


@dataclass
class UpdateTimes:
    """Where the time of weight updates went; sums over updates.

    Attributes:
        update_open_s: until the weights were at hand; the servers generate meanwhile.
        update_drain_s: waiting for running answers, with `finish_running`.
        update_pause_s: until the servers of a wave stood still.
        update_load_s: loading.
        update_resume_s: naming the version and going on.
        update_stall_s: that a server generated nothing, summed over servers.
        update_bytes: written for servers to load.
        updated_servers: server updates that succeeded.
        failed_servers: and that failed.
    """

    update_open_s: float = 0.0
    update_drain_s: float = 0.0
    update_pause_s: float = 0.0
    update_load_s: float = 0.0
    update_resume_s: float = 0.0
    update_stall_s: float = 0.0
    update_bytes: float = 0.0
    updated_servers: float = 0.0
    failed_servers: float = 0.0

    def add(self, other: UpdateTimes) -> None:
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def as_stats(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class WaveSettings:
    """How a wave is updated.

    Attributes:
        on_weight_update: what becomes of running answers.
        drain_timeout_s: after which an answer is interrupted all the same.
        step_timeout_s: of one step of loading.
        stays_paused: the servers were paused, and shall be afterwards.
    """

    on_weight_update: OnWeightUpdate
    drain_timeout_s: float
    step_timeout_s: float
    stays_paused: bool


def waves(replicas: Sequence[Replica], max_unavailable: int) -> Iterator[list[Replica]]:
    """The replicas in groups of `max_unavailable`, or all together when that is 0."""
    size = max_unavailable or max(1, len(replicas))
    for start in range(0, len(replicas), size):
        yield list(replicas[start : start + size])


async def update_wave(
    wave: Sequence[Replica],
    version: int,
    weights: LoadableWeights,
    dispatcher: Dispatcher,
    settings: WaveSettings,
) -> tuple[list[ArealError | None], UpdateTimes]:
    """Gives the weights to the servers of one wave; the errors are in their order.

    Broken off in between, as it is cancelled or fails, it gives all servers of the wave up: what
    they have is not known.
    """
    times = UpdateTimes()
    clock = _Clock()
    async with weights.prepared():
        times.update_open_s = clock.lap()
        lives = [replica.num_starts for replica in wave]
        errors = await _update(wave, version, weights, dispatcher, settings, times)
    for replica, error, life in zip(wave, errors, lives, strict=True):
        if error is None:
            times.updated_servers += 1
            continue
        times.failed_servers += 1
        if replica.num_starts == life:  # else it has started again since, by itself
            replica.fail(f"its weight update to version {version} failed: {error}")
    return errors, times


async def _update(
    wave: Sequence[Replica],
    version: int,
    weights: LoadableWeights,
    dispatcher: Dispatcher,
    settings: WaveSettings,
    times: UpdateTimes,
) -> list[ArealError | None]:
    """From the first server that takes no requests any more to the last that goes on."""
    clock = _Clock()
    for replica in wave:
        replica.hold()
    if settings.on_weight_update == OnWeightUpdate.finish_running and not settings.stays_paused:
        await asyncio.gather(
            *(_drain(dispatcher, replica, settings.drain_timeout_s) for replica in wave)
        )
    times.update_drain_s = clock.lap()
    for replica in wave:
        replica.set_updating(True)
    is_whole = False
    try:
        errors = await for_each(wave, lambda replica: replica.pause())
        times.update_pause_s = clock.lap()
        errors = await _load(wave, errors, weights, settings.step_timeout_s, times)
        times.update_load_s = clock.lap()
        errors = await for_each(wave, _go_on(version, settings.stays_paused), errors)
        times.update_resume_s = clock.lap()
        is_whole = True
    finally:
        for replica in wave:
            if not is_whole:
                replica.fail(f"its weight update to version {version} was broken off")
            replica.set_updating(False)
    stall_s = times.update_pause_s + times.update_load_s + times.update_resume_s
    times.update_stall_s = stall_s * len(wave)
    return errors


async def _drain(dispatcher: Dispatcher, replica: Replica, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await dispatcher.until_empty(replica.load)
    except TimeoutError:
        logger.warning(
            "server=%s still runs %d answers after %g s: they are interrupted",
            *(replica.load.name, replica.load.num_running, timeout_s),
        )


async def _load(
    wave: Sequence[Replica],
    errors: list[ArealError | None],
    weights: LoadableWeights,
    timeout_s: float,
    times: UpdateTimes,
) -> list[ArealError | None]:
    """Errors of before and of the load, in the order of the wave."""
    ready = [replica for replica, error in zip(wave, errors, strict=True) if error is None]
    if not ready:
        return errors
    report = await weights.load([replica.as_paused() for replica in ready], timeout_s=timeout_s)
    times.update_bytes = report.num_bytes
    found = dict(zip(ready, report.errors, strict=True))
    if report.broken_group is not None:
        for replica in wave:
            replica.groups.discard(report.broken_group)
    return [found.get(replica, error) for replica, error in zip(wave, errors, strict=True)]


def _go_on(version: int, stays_paused: bool) -> Callable[[Replica], Awaitable[None]]:
    async def go_on(replica: Replica) -> None:
        await replica.finish_update(version)
        if not stays_paused:
            await replica.resume()

    return go_on


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
