"""Replaces the weights of some servers, all at once or a few at a time.

For each wave of servers: wait for their running answers if that is asked for, pause, load, name
the version, go on. A server that fails anywhere on the way is given up, and whoever watches it
starts it again with the weights of then; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields

from areal_sc.config.schema import OnWeightUpdate, RolloutConfig
from areal_sc.engines.servers.dispatch import Dispatcher
from areal_sc.engines.servers.replica import Replica
from areal_sc.engines.servers.weights import LoadableWeights, for_each
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


async def update_wave(
    wave: Sequence[Replica],
    version: int,
    weights: LoadableWeights,
    dispatcher: Dispatcher,
    config: RolloutConfig,
    *,
    stays_paused: bool,
) -> tuple[list[ArealError | None], UpdateTimes]:
    """Gives the weights to the servers of one wave; the errors are in their order.

    Broken off in between, as it is cancelled or fails, it gives all servers of the wave up: what
    they have is not known.

    Args:
        stays_paused: the servers were paused, and shall be afterwards.
    """
    times = UpdateTimes()
    clock = _Clock()
    async with weights.prepared():
        times.update_open_s = clock.lap()
        for replica in wave:
            replica.hold()
        if config.on_weight_update == OnWeightUpdate.finish_running and not stays_paused:
            drains = (_drain(dispatcher, replica, config.group_timeout_s) for replica in wave)
            await asyncio.gather(*drains)
        times.update_drain_s = clock.lap()
        errors = await _replace(wave, version, weights, config, times, stays_paused=stays_paused)
    times.failed_servers = sum(error is not None for error in errors)
    times.updated_servers = len(wave) - times.failed_servers
    return errors, times


async def _replace(
    wave: Sequence[Replica],
    version: int,
    weights: LoadableWeights,
    config: RolloutConfig,
    times: UpdateTimes,
    *,
    stays_paused: bool,
) -> list[ArealError | None]:
    """From the first server that stands still to the last that goes on."""

    async def go_on(replica: Replica) -> None:
        await replica.finish_update(version)
        if not stays_paused:
            await replica.resume()

    clock = _Clock()
    is_whole = False
    for replica in wave:
        replica.set_updating(True)
    try:
        errors = await for_each(wave, lambda replica: replica.pause())
        times.update_pause_s = clock.lap()
        timeout_s = config.weight_update.step_timeout_s
        ready = [replica for replica, error in zip(wave, errors, strict=True) if error is None]
        if ready:
            report = await weights.load([r.as_paused() for r in ready], timeout_s=timeout_s)
            times.update_bytes = report.num_bytes
            found = dict(zip(ready, report.errors, strict=True))
            errors = [found.get(r, error) for r, error in zip(wave, errors, strict=True)]
            if report.broken_group is not None:
                for replica in wave:
                    replica.groups.discard(report.broken_group)
        times.update_load_s = clock.lap()
        errors = await for_each(wave, go_on, errors)
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


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
