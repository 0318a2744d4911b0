"""Replaces the weights of a server: it stands still, loads, names the version and goes on."""

from __future__ import annotations

import asyncio
import logging
import time

from areal_sc.config.schema import OnWeightUpdate, RolloutConfig
from areal_sc.engines.servers.server import ServerLife
from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights
from areal_sc.errors import EngineFailed, ModelError

logger = logging.getLogger(__name__)


async def update_server(
    server: ServerLife,
    weights: VersionWeights,
    times: UpdateTimes,
    config: RolloutConfig,
    *,
    stays_paused: bool,
) -> None:
    """Gives a server weights, which are open.

    Broken off once the server stands still, or failed, the server is lost: what it has is not
    known.

    Args:
        stays_paused: the server was paused, and shall be afterwards.
    Raises: ModelError: the server cannot serve such weights, or refuses these. TransportError: it
        cannot be asked now. After both it goes on as it was. EngineFailed: it is lost.
    """
    clock = _Clock()
    try:
        await weights.load_beside(server.client)
    except EngineFailed as error:
        raise ModelError(f"version {weights.version} is refused: {error}") from error
    times.update_open_s += clock.lap()
    with server.needed_for(f"its weight update to version {weights.version}"):
        server.hold()
        if config.on_weight_update == OnWeightUpdate.finish_running and not stays_paused:
            await _drain(server, config.group_timeout_s)
        times.update_drain_s += clock.lap()
        standstill = _Clock()
        with server.updating():
            await server.pause()
            await server.wake()
            times.update_pause_s += clock.lap()
            await weights.load(server.client, times)
            times.update_load_s += clock.lap()
            await server.take_cache()
            await server.finish_update(weights.version)
            if not stays_paused:
                await server.resume()
            times.update_resume_s += clock.lap()
        times.update_stall_s += standstill.lap()
    if not stays_paused:
        server.open()


async def _drain(server: ServerLife, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await server.places.is_empty.wait()
    except TimeoutError:
        logger.warning(
            "%s still runs %d answers after %g s: they are interrupted",
            server.name,
            server.places.num_running,
            timeout_s,
        )


class _Clock:
    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap before."""
        before, self._at = self._at, time.perf_counter()
        return self._at - before
