"""Replaces the weights of a wave of servers, which stand still together.

They wait for their running answers if that is asked for, pause, load, name the version and go on. A
server that fails anywhere on the way is given up, and whoever watches it starts it again with the
weights of then; the others go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from areal_sc.config.schema import OnWeightUpdate, RolloutConfig
from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.replica import Replica
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights, for_each
from areal_sc.errors import ArealError, EngineFailed, ModelError, PeerLost

logger = logging.getLogger(__name__)


async def update_wave(
    wave: Sequence[Replica],
    weights: VersionWeights,
    times: UpdateTimes,
    config: RolloutConfig,
    *,
    stays_paused: bool,
) -> dict[Replica, ArealError]:
    """Gives the weights, which are open, to the servers of a wave; returns those that failed.

    Broken off in between, as it is cancelled or fails, it gives all servers of the wave up: what
    they have is not known.

    Args:
        stays_paused: the servers were paused, and shall be afterwards.
    Raises: ModelError: servers cannot serve such weights, or all of them refuse these; all go on
        as they were.
    """
    clock, failed = _Clock(), dict[Replica, ArealError]()
    await weights.prepare()
    await for_each(wave, lambda replica: weights.load_beside(replica.client), failed)
    for error in failed.values():
        if isinstance(error, ModelError):
            raise error
    if len(refused := [e for e in failed.values() if isinstance(e, EngineFailed)]) == len(wave):
        raise ModelError(f"no server takes version {weights.version}: {refused[0]}") from refused[0]
    times.update_open_s += clock.lap()
    for replica in wave:
        replica.hold()
    if config.on_weight_update == OnWeightUpdate.finish_running and not stays_paused:
        await asyncio.gather(*(_drain(replica, config.group_timeout_s) for replica in wave))
    times.update_drain_s += clock.lap()
    is_whole = False
    for replica in wave:
        replica.set_updating(True)
    try:
        await _replace(wave, weights, times, failed, stays_paused=stays_paused)
        is_whole = True
    finally:
        for replica in wave:
            if not is_whole:
                replica.fail(f"its weight update to version {weights.version} was broken off")
            replica.set_updating(False)
    times.failed_servers += len(failed)
    times.updated_servers += len(wave) - len(failed)
    return failed


async def _replace(
    wave: Sequence[Replica],
    weights: VersionWeights,
    times: UpdateTimes,
    failed: dict[Replica, ArealError],
    *,
    stays_paused: bool,
) -> None:
    """From the first server that stands still to the last that goes on."""
    paused: dict[Replica, ServerClient] = {}

    async def pause(replica: Replica) -> None:
        await replica.pause()
        await replica.wake()
        paused[replica] = replica.client

    async def go_on(replica: Replica) -> None:
        if replica.client is not paused[replica]:  # it has not loaded them in this life
            raise PeerLost(f"{replica.name} was restarted")
        await replica.take_cache()
        await replica.finish_update(weights.version)
        if not stays_paused:
            await replica.resume()

    whole, clock = _Clock(), _Clock()
    await for_each(wave, pause, failed)
    times.update_pause_s += clock.lap()
    if paused:
        errors = await weights.load(list(paused.values()), times)
        failed |= {r: errors[client] for r, client in paused.items() if client in errors}
    times.update_load_s += clock.lap()
    await for_each(wave, go_on, failed)
    times.update_resume_s += clock.lap()
    times.update_stall_s += whole.lap() * len(wave)


async def _drain(replica: Replica, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await replica.is_empty.wait()
    except TimeoutError:
        logger.warning(
            "server=%s still runs %d answers after %g s: they are interrupted",
            *(replica.name, replica.num_running, timeout_s),
        )


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
