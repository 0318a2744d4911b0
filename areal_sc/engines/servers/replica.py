"""One server as the engine sees it: brought up, watched, replaced when it fails.

    consumes     requests that were placed on it, and updates of its weights
    waits for    its scheduler's answers, asked for every `probe_interval_s`
    unblocked by an answer, the end of its process, a request that lost its connection, or time

    down ── start, ask, load the current weights ──► serving ── failure ──► down ── …
                                                                   └─ max_restarts ──► given up

While it is down or its weights are replaced, the dispatcher places nothing on it. A failure ends
all requests that it has with PeerLost, and whoever waits for them asks another server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from areal_sc.config.schema import GenerationConfig, RolloutConfig, WeightUpdateMethod
from areal_sc.config.server_settings import ServersConfig
from areal_sc.engines.servers.client import ServedAdapter, ServerClient
from areal_sc.engines.servers.dispatch import Dispatcher, ServerLoad
from areal_sc.engines.servers.handle import ServerInstance, ServersHandle
from areal_sc.engines.servers.process import ServerProcess, free_port
from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.engines.servers.watch import ServerWatch
from areal_sc.errors import (
    ArealError,
    ConfigError,
    EngineFailed,
    PeerLost,
    RpcTimeout,
    WorkerStartError,
)

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = -1
"""Version of weights that are not known to be the model folder's, or a version of this run."""

MAX_PORT_RACES = 3
"""Starts after one that lost a port: servers choose free ones long before they listen there."""
_RECONNECT_POLL_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_ABORT_AGAIN_S = 0.2
_KEY_BYTES = 24


@dataclass(frozen=True)
class ReplicaSettings:
    """What all servers of an engine have in common.

    Attributes:
        owner: name of the worker, in the logs' names.
        api_key: of the servers that are started; random.
    """

    handle: ServersHandle
    log_folder: Path
    owner: str
    is_cuda: bool
    api_key: str = field(default_factory=lambda: secrets.token_hex(_KEY_BYTES), repr=False)

    @property
    def config(self) -> RolloutConfig:
        return self.handle.config

    @property
    def servers(self) -> ServersConfig:
        return self.handle.servers


class Replica(ServerLoad):
    """Made down; `bring_up` makes it run.

    Attributes:
        is_serving: it has the current weights, and whether it fails is watched.
        is_own: this process starts and ends the server.
        num_starts: how often it was brought up.
        num_pauses: how often its requests were interrupted.
        is_paused: it generates nothing until `resume`.
        is_asleep: it has given up its memory.
        has_memory: it has some, or takes some as it starts.
        server: its process, while it runs and is our own.
        failure: why it is down, or was last.
    """

    def __init__(
        self, index: int, settings: ReplicaSettings, dispatcher: Dispatcher[Replica]
    ) -> None:
        slots = -(-settings.config.max_running_sequences // settings.handle.num_servers)
        super().__init__(f"{settings.owner}/server-{index}", slots)
        urls = settings.servers.urls
        self.index = index
        self.url = urls[index] if urls else ""
        self.is_own = not urls
        self.is_serving = False
        self.num_starts = 0
        self.num_pauses = 0
        self.is_paused = self.is_asleep = self.has_memory = False
        self.server: ServerProcess | None = None
        self.failure = "it has not been started"
        self._settings = settings
        self._dispatcher = dispatcher
        self._client: ServerClient | None = None
        self._watch: ServerWatch | None = None
        self._is_held = True

    @property
    def client(self) -> ServerClient:
        """The client of the server's present life.

        Raises: PeerLost: it is down.
        """
        if self._client is None:
            raise PeerLost(f"{self.name} is down: {self.failure}")
        return self._client

    @property
    def is_up(self) -> bool:
        return self._client is not None

    async def bring_up(self, *, wait_s: float = 0.0) -> None:
        """Starts the server, or connects to it, and finds out what it can do.

        Its version is known then; it is closed to requests until `open`.

        Args:
            wait_s: how long it is tried to connect to a server of somebody else's.
        Raises: ConfigError, ModelError, WorkerStartError, TransportError: what is wrong with it;
            nothing of it is left running then.
        """
        for num_left in reversed(range(MAX_PORT_RACES + 1)):
            try:
                return await self._bring_up(wait_s)
            except WorkerStartError as error:
                has_chosen = self.is_own and not self._settings.servers.ports
                if not (num_left and has_chosen and _lost_port(error.log_tail)):
                    raise
                logger.warning("server=%s starts again, on other ports: %s", self.name, error)

    async def _bring_up(self, wait_s: float) -> None:
        settings, servers, server = self._settings, self._settings.servers, None
        key = os.environ.get(servers.api_key_env, "") if servers.api_key_env else ""
        self.has_memory = True
        async with AsyncExitStack() as undo:
            undo.callback(self._note_end)
            if self.is_own:
                server, key = await self._start_server(), settings.api_key
                self.url = server.url
                undo.push_async_callback(server.kill)
            client = settings.handle.connect(self.url, key, is_own=self.is_own)
            undo.push_async_callback(client.close)
            if server is not None:
                await server.wait_ready(client, servers.start_timeout_s)
            else:
                await _resume_soon(client, wait_s)  # an earlier run may have left it paused
            client.abilities = await client.ask_abilities()
            model_folder, max_tokens = settings.config.path, settings.config.max_context_tokens
            client.abilities.check(self.url, model_folder, max_tokens)
            if settings.config.lora.is_published_alone:
                client.adapter = ServedAdapter("", 0)
            self.version = 0 if self.is_own else await self._find_version(client)
            undo.pop_all()
        self._client, self.server = client, server
        self.is_paused = self.is_asleep = False
        self.num_starts += 1
        self._watch = ServerWatch(client, server, servers, self._reopen)
        logger.info(
            "server=%s url=%s version=%s abilities=%s",
            *(self.name, self.url, self.version, client.abilities),
        )

    def open(self) -> None:
        """Lets the dispatcher place requests on it."""
        self._is_held = False
        self._reopen()

    def hold(self) -> None:
        """The dispatcher places nothing on it until `open`; what it has goes on."""
        self._is_held = True
        self.is_open = False

    async def watch(self) -> str:
        """Returns why the server has to be replaced."""
        assert self._watch, "watched when it is up"
        return await self._watch.run()

    def fail(self, reason: str) -> None:
        """Gives the server up; `watch` returns."""
        self.is_serving = False
        self.hold()
        if self._watch is not None:
            self._watch.fail(reason)

    async def take_down(self, reason: str, *, is_gentle: bool = False) -> None:
        """Ends all requests with PeerLost, and the server if it is ours: asked to, or killed."""
        self.is_serving = False
        self.hold()
        self.failure = reason
        self._watch = None
        self._dispatcher.forget_homes(self)
        client, self._client = self._client, None
        server, self.server = self.server, None
        if client is not None:
            await client.close()
        if server is not None:
            await (server.stop() if is_gentle else server.kill())
        self._note_end()

    def _note_end(self) -> None:
        self.has_memory = False

    async def generate(
        self, request: CompletionRequest, request_id: str, max_support: int | None
    ) -> AnswerPart:
        """Generates like `ServerClient.generate`. Raises: PeerLost: the request is lost."""
        client = self.client
        async with self._noting_losses(client):
            return await client.generate(request, request_id, max_support)

    async def stream(
        self, request: CompletionRequest, request_id: str, max_support: int | None
    ) -> AsyncGenerator[AnswerPart]:
        """Gives parts like `ServerClient.stream`. Raises: PeerLost: the rest is lost."""
        client = self.client
        async with (
            self._noting_losses(client),
            aclosing(client.stream(request, request_id, max_support)) as parts,
        ):
            async for part in parts:
                yield part

    @asynccontextmanager
    async def _noting_losses(self, client: ServerClient) -> AsyncIterator[None]:
        try:
            async with self._finding_losses(client):
                yield
        except PeerLost as error:
            if self._client is not client:
                raise PeerLost(f"{self.name} was lost: {self.failure}") from error
            if self._watch is not None:  # nothing is placed there before it has answered
                self.is_open = False
                self._watch.suspect()
            raise

    @asynccontextmanager
    async def _finding_losses(self, client: ServerClient) -> AsyncIterator[None]:
        """A server that refuses, and whose computing process is gone, is lost."""
        try:
            yield
        except EngineFailed as error:
            try:
                await client.probe(timeout_s=_PROBE_TIMEOUT_S)
            except (ArealError, TimeoutError):
                raise PeerLost(f"{self.name} has failed: {error}") from error
            raise

    async def max_support(self, sampling: GenerationConfig) -> int:
        """Largest number of tokens that a truncated distribution of a request may have.

        Raises: ConfigError: none, or fewer than are asked for. PeerLost: the server is down.
            RpcTimeout, ServerBusy: as `ServerClient.max_support`.
        """
        limit = await self.client.max_support()
        if limit == 0:
            raise ConfigError(
                f"{self.url} gives no log-probabilities under top_p and top_k: set "
                "generation.top_p to 1 and generation.top_k to 0, or use a newer "
                f"{self._settings.handle.name}"
            )
        if sampling.top_k > limit:
            raise ConfigError(
                f"generation.top_k is {sampling.top_k}, but {self.url} has a limit of {limit}: set "
                f"{self._settings.handle.support_setting}"
            )
        return limit

    async def abort(self, request_id: str) -> None:
        """Asks the server to end a request; one that is lost has ended it."""
        with suppress(ArealError):
            await self.client.abort(request_id)

    async def pause(self) -> None:
        """Holds the server, and returns when it generates nothing.

        Running requests are held where the server tells which weights sampled which token.
        """
        self.hold()
        if not self.is_paused:
            self.num_pauses += 1
            if self.client.adapter is None:
                await self.client.pause(holds_requests=self.client.abilities.has_version_spans)
            else:
                await self._end_answers()
            self.is_paused = True

    async def sleep(self) -> None:
        """Answers all requests with what they have, and gives up weights and KV cache."""
        self.hold()
        if not self.is_paused:
            self.num_pauses += 1
            await self.client.pause(holds_requests=False)
            self.is_paused = True
        await self._end_answers()  # those that a pause has held
        self.set_updating(True)
        try:
            await self.client.sleep()
        finally:
            self.set_updating(False)
        self.is_asleep, self.has_memory = True, False

    async def wake(self) -> None:
        """It can load weights; `take_cache` follows when it has them."""
        if self.is_asleep:
            self.has_memory = True
            await self.client.take_weights_memory()

    async def take_cache(self) -> None:
        """It can go on."""
        if self.is_asleep:
            await self.client.take_cache_memory()
            self.is_asleep = False

    async def _end_answers(self) -> None:
        """All requests are answered with what they have: one that was begun keeps its adapter.

        Raises: RpcTimeout: one was not.
        """
        limit_s = self._settings.servers.control_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not self.is_empty.is_set():
                    await self.client.abort_all()
                    with suppress(TimeoutError):  # one may have arrived after that
                        await asyncio.wait_for(self.is_empty.wait(), _ABORT_AGAIN_S)
        except TimeoutError as error:
            raise RpcTimeout(f"{self.name} did not end its answers within {limit_s:g} s") from error

    async def resume(self) -> None:
        """Running requests go on; `open` lets new ones in."""
        if self.is_paused:
            if self.client.adapter is None:
                await self.client.resume()
            self.is_paused = False

    def set_updating(self, is_updating: bool) -> None:
        """See `ServerWatch`."""
        if self._watch is not None:
            self._watch.set_updating(is_updating)

    async def finish_update(self, version: int) -> None:
        """Names the weights that the server has loaded, and checks that it took the name.

        Raises: EngineFailed: it did not.
        """
        client = self.client
        await client.set_version(version)
        told, _ = await client.served_weights()
        if told != version:
            raise EngineFailed(f"{self.url} says its weights are {told}, expected {version}")
        self.version = version

    async def _start_server(self) -> ServerProcess:
        settings, servers = self._settings, self._settings.servers
        port = servers.ports[self.index] if servers.ports else free_port(servers.host)
        instance = ServerInstance(self.index, port, settings.api_key, is_cuda=settings.is_cuda)
        log = settings.log_folder / f"{settings.owner}-{settings.handle.section}-{self.index}.log"
        return await ServerProcess.start(settings.handle.in_life(self.num_starts), instance, log)

    async def _find_version(self, client: ServerClient) -> int:
        """Version of a server that somebody else has started: 0 when it has the model folder's
        weights, as far as that can be told."""
        version, served = await client.served_weights()
        if version != 0:
            return UNKNOWN_VERSION
        config = self._settings.config
        if not _is_same_folder(served, config.path):
            if config.weight_update.method == WeightUpdateMethod.disk:
                return UNKNOWN_VERSION  # it sees the model folder, and loads it
            logger.warning(
                "server=%s serves %s: it has to hold the weights of %s",
                *(self.url, served, config.path),
            )
        await client.set_version(0)
        return 0

    def _reopen(self) -> None:
        self.is_open = self.is_up and not self._is_held
        self._dispatcher.changed()


async def _resume_soon(client: ServerClient, wait_s: float) -> None:
    """Returns when the server has answered. Raises what its first failure after `wait_s` was."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return await client.resume()
        except (PeerLost, RpcTimeout):
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_RECONNECT_POLL_S)


def _is_same_folder(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _lost_port(log_tail: Sequence[str]) -> bool:
    """Whether the end of a server's log says that another process has taken a port of it."""
    return any("address already in use" in line.lower() for line in log_tail)
