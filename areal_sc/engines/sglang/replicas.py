"""All servers of an engine: brought up, kept at the current weights, replaced when they fail.

    consumes     weights to publish, pause, resume, close
    waits for    servers that start, load or drain, each wait bounded by its setting
    unblocked by their answers; one task a server watches it and starts it again

A server *serves* from the moment that it has the current weights. It becomes current and serving
without giving up the event loop in between, so that a publication either finds it serving and
updates it, or is found by it.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress

from areal_sc.config.schema import OnWeightUpdate
from areal_sc.engines.sglang.abilities import check_version
from areal_sc.engines.sglang.collective import group_request
from areal_sc.engines.sglang.dispatch import Dispatcher
from areal_sc.engines.sglang.replica import Replica, ReplicaSettings, unusable
from areal_sc.engines.sglang.routing import Router, ServerLoad
from areal_sc.engines.sglang.server import installed_version
from areal_sc.engines.sglang.updates import UpdateTimes, WaveSettings, update_wave, waves
from areal_sc.engines.sglang.weights import DiskWeights, LoadableWeights, Weights
from areal_sc.errors import (
    ArealError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ShardGone,
    WaitTimeout,
)
from areal_sc.weights import WeightGroup

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0


class ReplicaSet:
    """The servers, the weights that they shall have, and whether they shall generate.

    Attributes:
        dispatcher: places requests on them.
        version: policy version of the oldest weights that a request may meet.
        times: sums over weight updates.
        num_losses: servers that failed while they served.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        num_servers = len(settings.sglang.urls) or settings.sglang.num_servers
        self.dispatcher = Dispatcher(Router([]))
        self.replicas = [Replica(i, settings, self.dispatcher) for i in range(num_servers)]
        self.dispatcher.router.servers.extend(replica.load for replica in self.replicas)
        self.version = 0
        self.times = UpdateTimes()
        self.num_losses = 0
        self._by_load = {replica.load: replica for replica in self.replicas}
        self._settings = settings
        self._weights: Weights = DiskWeights(0, settings.config.path)
        self._serving: set[Replica] = set()
        self._given_up: set[Replica] = set()
        self._changed = asyncio.Event()
        self._control = asyncio.Lock()  # one update, pause or resume at a time
        self._group_sizes: dict[str, int] = {}
        self._is_paused = False
        self._starts: list[asyncio.Task[None]] = []
        self._supervisors: list[asyncio.Task[None]] = []

    def replica(self, load: ServerLoad) -> Replica:
        return self._by_load[load]

    @property
    def num_serving(self) -> int:
        return len(self._serving)

    @property
    def num_restarts(self) -> int:
        return sum(max(0, replica.num_starts - 1) for replica in self.replicas)

    async def start(self) -> None:
        """Brings all servers up at once.

        Raises: the first error of a server; none is left running then.
        """
        sglang = self._settings.sglang
        if not sglang.urls:
            python = sglang.python or sys.executable
            check_version(await installed_version(python), f"sglang.python={python!r}")
        self._starts = [asyncio.create_task(self._start_one(r)) for r in self.replicas]
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            await asyncio.gather(*self._starts)
            undo.pop_all()
        for replica in self.replicas:
            task = asyncio.create_task(self._supervise(replica))
            task.add_done_callback(self._note_end)
            self._supervisors.append(task)

    async def close(self) -> None:
        """Ends the servers that were started here; those of others generate again if paused."""
        self._changed.set()
        tasks = [*self._starts, *self._supervisors]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._serving.clear()
        for replica in self.replicas:
            if not replica.is_own and replica.is_up:
                with suppress(ArealError):
                    await replica.resume()
        await asyncio.gather(
            *(
                replica.take_down("the engine is closed", is_gentle=True)
                for replica in self.replicas
            )
        )

    async def publish(self, weights: Weights) -> None:
        """Gives all serving servers these weights, wave by wave.

        Returns when at least one serves them, and every other one does, or is being restarted.
        Raises: EngineFailed: no server is left. What getting the weights raises; nothing has
            changed then.
        """
        config = self._settings.config
        async with self._control:
            started = time.perf_counter()
            async with weights.opened() as loadable:
                self.times.update_open_s += time.perf_counter() - started
                self._weights = weights
                self._changed.set()
                settings = WaveSettings(
                    on_weight_update=OnWeightUpdate(config.on_weight_update),
                    drain_timeout_s=config.group_timeout_s,
                    step_timeout_s=config.weight_update.step_timeout_s,
                    stays_paused=self._is_paused,
                )
                serving = sorted(self._serving, key=lambda replica: replica.index)
                for wave in waves(serving, config.max_unavailable):
                    still = [replica for replica in wave if replica in self._serving]
                    await self._update(still, weights.version, loadable, settings)
            await self._until_current()
            self.version = min(replica.load.version for replica in self._serving)

    async def pause(self) -> None:
        """Returns when no server generates; running requests are held."""
        async with self._control:
            self._is_paused = True
            await self._tell_serving(Replica.pause)

    async def resume(self) -> None:
        async with self._control:
            self._is_paused = False
            await self._tell_serving(Replica.resume)
            for replica in self._serving:
                replica.open()

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """The serving servers become ranks of a weight group, from `first_rank` on.

        Waits for all ranks of the group, so the others must join at the same time.
        Raises: EngineFailed, TransportError: a server did not join; the group is of no use then.
        """
        members = sorted(self._serving, key=lambda replica: replica.index)
        timeout_s = self._settings.config.weight_update.step_timeout_s
        rank = first_rank
        joins = []
        for replica in members:
            joins.append(replica.client.join_group(group_request(group, rank), timeout_s=timeout_s))
            rank += replica.abilities.tp_size
        outcomes = await asyncio.gather(*joins, return_exceptions=True)
        for outcome in outcomes:
            if outcome is not None:
                raise outcome
        for replica in members:
            replica.groups.add(group.name)
        self._group_sizes = {group.name: len(members)}  # one group at a time

    async def leave_group(self, name: str) -> None:
        """Ends a weight group on the servers that are in it."""
        timeout_s = self._settings.sglang.control_timeout_s
        for replica in [r for r in self._serving if name in r.groups]:
            replica.groups.discard(name)
            try:
                await replica.client.leave_group(name, timeout_s=timeout_s)
            except (EngineFailed, PeerLost, RpcTimeout) as error:
                logger.warning("server=%s group=%s %s", replica.load.name, name, error)

    def num_members(self, name: str) -> int:
        """Servers that have joined a weight group, whether or not they are still in it."""
        return self._group_sizes.get(name, 0)

    def has_whole_group(self, name: str) -> bool:
        """Whether every serving server is in the weight group, and nobody has left it."""
        members = [replica for replica in self._serving if name in replica.groups]
        return len(self._serving) == len(members) == self.num_members(name) > 0

    def count_ranks(self) -> int:
        """Ranks of the serving servers."""
        return sum(replica.abilities.tp_size for replica in self._serving)

    async def _start_one(self, replica: Replica) -> None:
        try:
            await replica.bring_up()
        except (PeerLost, RpcTimeout, ProtocolError, EngineFailed) as error:
            if not replica.is_own:
                raise unusable(replica.url, error) from error
            raise
        await self._become_serving(replica)

    async def _supervise(self, replica: Replica) -> None:
        while True:
            reason = await replica.watch()
            self._serving.discard(replica)
            self.num_losses += 1
            logger.warning("server=%s lost: %s", replica.load.name, reason)
            await replica.take_down(reason)
            if not await self._bring_back(replica):
                self._give_up(replica)
                return
            logger.info("server=%s is back version=%d", replica.load.name, replica.load.version)

    def _note_end(self, supervisor: asyncio.Task[None]) -> None:
        """A supervisor that raises leaves its server alone: nothing may rely on it any more."""
        if not supervisor.cancelled() and (error := supervisor.exception()):
            logger.error("a server is watched no more", exc_info=error)
            self.dispatcher.fail(EngineFailed(f"watching a server failed: {error!r}"))
            self._changed.set()

    async def _bring_back(self, replica: Replica) -> bool:
        """Whether the server serves again."""
        sglang = self._settings.sglang
        for attempt in range(sglang.max_restarts):
            try:
                if replica.is_own:
                    await replica.bring_up()
                else:
                    await replica.reconnect(sglang.start_timeout_s)
                await self._become_serving(replica)
                return True
            except ArealError as error:
                logger.warning(
                    "server=%s attempt=%d of %d failed: %s",
                    *(replica.load.name, attempt + 1, sglang.max_restarts, error),
                )
                await replica.take_down(str(error))
                await asyncio.sleep(min(2.0**attempt, _MAX_BACKOFF_S))
        return False

    async def _become_serving(self, replica: Replica) -> None:
        """Gives the server what has changed since it started, until nothing has."""
        settings = WaveSettings(
            OnWeightUpdate.interrupt,
            drain_timeout_s=0.0,
            step_timeout_s=self._settings.config.weight_update.step_timeout_s,
            stays_paused=True,
        )
        while True:
            weights = self._weights
            if replica.load.version != weights.version:
                try:
                    async with weights.again.opened() as loadable:
                        errors, _ = await update_wave(
                            [replica], weights.version, loadable, self.dispatcher, settings
                        )
                except ShardGone:  # the trainers have newer ones, which will be published
                    await self._until_newer(weights)
                    continue
                if errors[0] is not None:
                    raise errors[0]
            elif self._is_paused and not replica.is_paused:
                await replica.pause()
            elif replica.is_paused and not self._is_paused:
                await replica.resume()
            else:
                break
        # from here on without an await: see the top of the file
        self._serving.add(replica)
        if not self._is_paused:
            replica.open()
        self._changed.set()

    def _give_up(self, replica: Replica) -> None:
        self._given_up.add(replica)
        left = len(self.replicas) - len(self._given_up)
        logger.error("server=%s is given up; %d are left", replica.load.name, left)
        if left == 0:
            self.dispatcher.fail(
                EngineFailed(
                    f"all {len(self.replicas)} SGLang servers are lost, the last one after "
                    f"{self._settings.sglang.max_restarts} failed starts; see "
                    f"{self._settings.log_folder}"
                )
            )
        self._changed.set()

    async def _update(
        self,
        wave: Sequence[Replica],
        version: int,
        weights: LoadableWeights,
        settings: WaveSettings,
    ) -> None:
        if not wave:
            return
        lives = [replica.num_starts for replica in wave]
        errors, times = await update_wave(wave, version, weights, self.dispatcher, settings)
        self.times.add(times)
        for replica, error, life in zip(wave, errors, lives, strict=True):
            if replica.num_starts != life:
                continue  # it has started again meanwhile, and has found the weights by itself
            if error is not None:
                self._serving.discard(replica)
            elif not settings.stays_paused:
                replica.open()

    async def _until_current(self) -> None:
        """Waits until a server has the newest weights; those that restart load them by themselves.

        Bounded by the limits of a start.
        """
        while not any(r.load.version == self._weights.version for r in self._serving):
            if self.dispatcher.failure is not None:
                raise self.dispatcher.failure
            self._changed.clear()
            await self._changed.wait()

    async def _until_newer(self, weights: Weights) -> None:
        """Waits for the next publication.

        Raises: WaitTimeout: there was none for longer than a group may take.
        """
        try:
            async with asyncio.timeout(self._settings.config.group_timeout_s):
                while self._weights is weights:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise WaitTimeout(
                f"version {weights.version} is not to be had any more, and no newer one came"
            ) from error

    async def _tell_serving(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        """A server that does not do it is given up."""

        async def tell(replica: Replica) -> None:
            try:
                await action(replica)
            except ArealError as error:
                replica.fail(f"it did not pause or resume: {error}")

        await asyncio.gather(*map(tell, list(self._serving)))
