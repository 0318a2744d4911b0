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
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from areal_sc.engines.servers.client import ServerClient
from areal_sc.engines.servers.dispatch import Dispatcher
from areal_sc.engines.servers.replica import Replica, ReplicaSettings
from areal_sc.engines.servers.updates import update_wave
from areal_sc.engines.servers.weights import DiskWeights, UpdateTimes, VersionWeights, for_each
from areal_sc.errors import (
    ArealError,
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ShardGone,
    WaitTimeout,
    WorkerError,
)
from areal_sc.weights import WeightGroup

logger = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
_NEWER_WITHIN_S = 30.0
"""Weights that are gone have been replaced by newer ones, which come in this time, or are lost."""


class ReplicaSet:
    """The servers, the weights that they shall have, and whether they shall generate.

    Attributes:
        dispatcher: places requests on them; its failure is why nothing can be done.
        version: policy version of the oldest weights that a request may meet.
        times: sums over weight updates.
        num_updates: weight updates that were done.
        num_losses: servers that failed while they served.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self.replicas: list[Replica] = []
        self.dispatcher = Dispatcher(self.replicas)
        self.version = 0
        self.times = UpdateTimes()
        self.num_updates = 0
        self.num_losses = 0
        self._settings = settings
        self._first: VersionWeights = DiskWeights(0, Path(settings.config.path))
        self._weights: VersionWeights = self._first
        self._num_left = settings.handle.num_servers
        self._changed = asyncio.Event()
        self._control = asyncio.Lock()  # one update, pause or resume at a time
        self._group_sizes: dict[str, int] = {}
        self._is_paused = self._is_asleep = False
        self._is_closed = False
        self._tasks: list[asyncio.Task[None]] = []
        for index in range(settings.handle.num_servers):
            self.replicas.append(Replica(index, settings, self.dispatcher))
        self.dispatcher.fail(self._failure("has not been started"))

    @property
    def serving(self) -> list[Replica]:
        """The replicas that serve, in a fixed order."""
        return [replica for replica in self.replicas if replica.is_serving]

    @property
    def is_cuda(self) -> bool:
        return self._settings.is_cuda

    async def start(self) -> None:
        """Starts the servers, or connects to them, and returns when all of them serve.

        To be called in the thread whose end shall end the servers.
        Raises: ConfigError, ModelError, WorkerStartError: what is wrong, and what to change; none
            is left running then.
        """
        starts = [asyncio.create_task(self._start_one(r)) for r in self.replicas]
        self._tasks += starts
        async with AsyncExitStack() as undo:
            undo.push_async_callback(self.close)
            try:
                await asyncio.gather(*starts)
            finally:
                if self._is_closed:
                    raise self._failure("is closed")
            undo.pop_all()
        self.dispatcher.failure = None
        for replica in self.replicas:
            task = asyncio.create_task(self._supervise(replica))
            task.add_done_callback(self._note_end)
            self._tasks.append(task)

    async def close(self) -> None:
        """Ends the servers that were started here; those of others generate again if paused."""
        self._is_closed = True
        self.dispatcher.fail(self._failure("is closed"))
        self._changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for replica in self.replicas:
            if not replica.is_own and replica.is_up:
                with suppress(ArealError):
                    await replica.resume()
        ends = (r.take_down("the engine is closed", is_gentle=True) for r in self.replicas)
        await asyncio.gather(*ends)

    async def publish(self, weights: VersionWeights) -> None:
        """Gives all serving servers these weights, wave by wave.

        Returns when at least one serves them, and every other one does, or is being restarted.
        Raises: EngineFailed: no server is left. What getting the weights raises; nothing has
            changed then.
        """
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure
        async with self._control:
            started = time.perf_counter()
            async with weights.opened():
                self.times.update_open_s += time.perf_counter() - started
                self._weights, self._is_asleep = weights, False
                self.dispatcher.newest_version = weights.version
                self._changed.set()
                serving = self.serving
                size = self._settings.config.max_unavailable or max(1, len(serving))
                for start in range(0, len(serving), size):
                    await self._update([r for r in serving[start : start + size] if r.is_serving])
            await self._until_current()
            self.version = min(replica.version for replica in self.serving)
            self.num_updates += 1

    async def pause(self) -> None:
        """Returns when no server generates; running requests are held."""
        async with self._control:
            self._is_paused = True
            await self._tell_serving(Replica.pause)

    async def resume(self) -> None:
        async with self._control:
            self._is_paused = False
            if self._is_asleep:
                return  # it goes on with the next weights
            await self._tell_serving(Replica.resume)
            for replica in self.serving:
                replica.open()

    async def sleep(self) -> None:
        """Returns when no server has memory of the device; they take it again for the next weights.

        One that does not give it up is ended, and started again then.
        """
        async with self._control:
            self._is_asleep = True
            await self._tell_serving(Replica.sleep)
            while any(replica.has_memory for replica in self.replicas):
                await self._next_change()

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """The serving servers become ranks of a weight group, from `first_rank` on.

        Waits for all ranks of the group, so the others must join at the same time.
        Raises: EngineFailed, TransportError: a server did not join; the group is of no use then.
        """
        clients = [replica.client for replica in self.serving]
        joins = []
        for client in clients:
            joins.append(client.join_group(group, first_rank))
            first_rank += client.abilities.tp_size
        for outcome in await asyncio.gather(*joins, return_exceptions=True):
            if outcome is not None:
                raise outcome
        for client in clients:
            client.groups.add(group.name)
        self._group_sizes = {group.name: len(clients)}  # one group at a time

    async def leave_group(self, name: str) -> None:
        for client in self._members(name):
            client.groups.discard(name)
            try:
                await client.leave_group(name)
            except (EngineFailed, PeerLost, RpcTimeout) as error:
                logger.warning("server=%s group=%s %s", client.url, name, error)

    def has_whole_group(self, name: str) -> bool:
        """Whether every serving server is in the weight group, and nobody has left it."""
        num_members = len(self._members(name))
        return len(self.serving) == num_members == self._group_sizes.get(name, 0) > 0

    def count_ranks(self) -> int:
        return sum(replica.client.abilities.tp_size for replica in self.serving)

    def _members(self, group_name: str) -> list[ServerClient]:
        clients = (replica.client for replica in self.serving)
        return [client for client in clients if group_name in client.groups]

    async def _start_one(self, replica: Replica) -> None:
        try:
            await replica.bring_up()
        except (PeerLost, RpcTimeout, ProtocolError, EngineFailed) as error:
            if not replica.is_own:
                section, name = self._settings.handle.section, self._settings.handle.name
                raise ConfigError(
                    f"{section}.urls: no {name} server answers at {replica.url} as one does "
                    f"({error}); start it, or correct the URL"
                ) from error
            raise
        await self._become_serving(replica)

    async def _supervise(self, replica: Replica) -> None:
        is_back = True
        while is_back:
            reason = await replica.watch()
            self.num_losses += 1
            logger.warning("server=%s lost: %s", replica.name, reason)
            await replica.take_down(reason)
            self._changed.set()
            is_back = await self._bring_back(replica)
        self._num_left -= 1
        logger.error("server=%s is given up; %d are left", replica.name, self._num_left)
        if self._num_left == 0:
            self.dispatcher.fail(
                EngineFailed(
                    f"all {len(self.replicas)} {self._settings.handle.name} servers are lost, the "
                    f"last one after {self._settings.servers.max_restarts} failed starts, the last "
                    f"of them as {replica.failure}; see {self._settings.log_folder}"
                )
            )
        self._changed.set()

    def _note_end(self, supervisor: asyncio.Task[None]) -> None:
        """A supervisor that raises leaves its server alone: nothing may rely on it any more."""
        if not supervisor.cancelled() and (error := supervisor.exception()):
            logger.error("a server is watched no more", exc_info=error)
            self.dispatcher.fail(EngineFailed(f"watching a server failed: {error!r}"))
            self._changed.set()

    async def _bring_back(self, replica: Replica) -> bool:
        """Whether the server serves again."""
        servers = self._settings.servers
        for attempt in range(servers.max_restarts):
            while self._is_asleep:
                await self._next_change()
            try:
                await replica.bring_up(wait_s=servers.start_timeout_s)
                await self._become_serving(replica)
                logger.info("server=%s is back version=%d", replica.name, replica.version)
                return True
            except ArealError as error:
                logger.warning(
                    "server=%s attempt=%d of %d failed: %s",
                    *(replica.name, attempt + 1, servers.max_restarts, error),
                )
                await replica.take_down(str(error))
                self._changed.set()
                await asyncio.sleep(min(2.0**attempt, _MAX_BACKOFF_S))
        return False

    async def _become_serving(self, replica: Replica) -> None:
        """Gives the server what has changed since it started, until nothing has."""
        loaded = self._first if replica.version == 0 else None
        while True:
            weights = self._weights  # another history may have weights of the same version
            if loaded is not weights:
                try:
                    async with weights.again.opened():
                        failed = await update_wave(
                            [replica],
                            weights.again,
                            UpdateTimes(),
                            self._settings.config,
                            stays_paused=True,
                        )
                except ShardGone:  # the trainers have newer ones, which will be published
                    await self._until_newer(weights)
                    continue
                if failed:
                    raise failed[replica]
                loaded = weights
            elif self._is_asleep:
                if not replica.is_asleep:
                    await replica.sleep()
                    self._changed.set()
                loaded = None  # it has lost them
                await self._next_change()
            elif self._is_paused and not replica.is_paused:
                await replica.pause()
            elif replica.is_paused and not self._is_paused:
                await replica.resume()
            else:
                break
        # from here on without an await: see the top of the file
        replica.is_serving = True
        if not self._is_paused:
            replica.open()
        self._changed.set()

    def _failure(self, state: str) -> WorkerError:
        return WorkerError(f"the {self._settings.handle.name} engine {state}")

    async def _update(self, wave: Sequence[Replica]) -> None:
        if not wave:
            return
        weights, lives = self._weights, [replica.num_starts for replica in wave]
        failed = await update_wave(
            wave, weights, self.times, self._settings.config, stays_paused=self._is_paused
        )
        for replica, life in zip(wave, lives, strict=True):
            if replica.num_starts != life:
                continue  # it has started again meanwhile, and has found the weights by itself
            if error := failed.get(replica):
                replica.fail(f"its weight update to version {weights.version} failed: {error}")
            elif not self._is_paused:
                replica.open()

    async def _until_current(self) -> None:
        """Waits until a server has the newest weights; those that restart load them by themselves.

        Bounded by the limits of a start.
        """
        while not any(r.version == self._weights.version for r in self.serving):
            if self.dispatcher.failure is not None:
                raise self.dispatcher.failure
            await self._next_change()

    async def _next_change(self) -> None:
        self._changed.clear()
        await self._changed.wait()

    async def _until_newer(self, weights: VersionWeights) -> None:
        """Waits for the next publication.

        Raises: WaitTimeout: there was none for longer than a group may take. Where no server
            serves, nobody generates for it: the engine fails soon, and its worker starts again.
        """
        message = f"version {weights.version} is not to be had any more, and no newer one came"
        limit_s = self._settings.config.group_timeout_s if self.serving else _NEWER_WITHIN_S
        try:
            async with asyncio.timeout(limit_s):
                while self._weights is weights:
                    await self._next_change()
        except TimeoutError as error:
            if not self.serving:
                self.dispatcher.fail(EngineFailed(f"no server is left, and {message}"))
            raise WaitTimeout(message) from error

    async def _tell_serving(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        """A server that does not do it is given up."""
        failed: dict[Replica, ArealError] = {}
        await for_each(self.serving, action, failed)
        for replica, error in failed.items():
            replica.fail(f"it did not pause, resume or sleep: {error}")
