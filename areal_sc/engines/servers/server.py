"""One server as its engine sees it: started or connected to, and watched until it is lost.

    consumes     requests that have a place on it, and updates of its weights
    waits for    its scheduler's answers, asked for every `probe_interval_s`
    unblocked by an answer, the end of its process, a request that lost its connection, or time

    start ──► its requests wait ── open ──► it serves ── lost ──► all requests end

A lost server is not started again here. Its worker ends with it: workers are replaced already, and
a worker's own start is short beside that of its server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path

from areal_sc.config.schema import GenerationConfig, WeightUpdateMethod
from areal_sc.engines.servers.client import ServedAdapter, ServerClient
from areal_sc.engines.servers.handle import ServerInstance, ServersHandle
from areal_sc.engines.servers.places import Places
from areal_sc.engines.servers.process import ServerProcess, free_port
from areal_sc.engines.servers.watch import ServerWatch
from areal_sc.errors import (
    ArealError,
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    WorkerStartError,
)
from areal_sc.system.waiting import cancel_all

logger = logging.getLogger(__name__)

UNKNOWN_VERSION = -1
"""Version of weights that are not known to be the model folder's, or a version of a run."""

MAX_PORT_RACES = 3
"""Starts after one that lost a port: servers choose free ones long before they listen there."""
_RECONNECT_POLL_S = 1.0
_PROBE_TIMEOUT_S = 5.0
_ABORT_AGAIN_S = 0.2
_KEY_BYTES = 24


class ServerLife:
    """The life of one server, which is made before it begins.

    Attributes:
        name: for messages.
        is_own: this process starts and ends the server.
        url: where it listens.
        version: policy version of its weights.
        places: of its requests.
        num_pauses: how often its requests were interrupted.
        is_paused: it generates nothing until `resume`.
        is_asleep: it has given up its memory.
        process: the server's, while it runs and is our own.
    """

    def __init__(
        self, handle: ServersHandle, log_folder: Path, owner: str, *, is_cuda: bool
    ) -> None:
        urls = handle.servers.urls
        self.name = f"the server of {owner}"
        self.is_own = not urls
        self.url = urls[0] if urls else ""
        self.version = 0
        self.places = Places(handle.config.max_running_sequences)
        self.num_pauses = 0
        self.is_paused = self.is_asleep = False
        self.process: ServerProcess | None = None
        self._handle = handle
        self._log_path = log_folder / f"{owner}-{handle.section}.log"
        self._api_key = secrets.token_hex(_KEY_BYTES)
        self._is_cuda = is_cuda
        self._client: ServerClient | None = None
        self._watch: ServerWatch | None = None
        self._following: asyncio.Task[str] | None = None
        self._is_held = True
        self._is_doubted = False

    @property
    def client(self) -> ServerClient:
        """The client of the server.

        Raises: WorkerError: it is lost, or closed.
        """
        if self._client is None:
            raise self.places.failure or EngineFailed(f"{self.name} has not been started")
        return self._client

    @property
    def is_down(self) -> bool:
        """Whether it is lost or closed, or has not been started yet."""
        return self._client is None

    async def start(self) -> None:
        """Starts the server, or connects to it, and finds out what it can do.

        Its version is known then; it is closed to requests until `open`.

        Raises: ConfigError, ModelError, WorkerStartError, TransportError: what is wrong with it;
            nothing of it is left running then.
        """
        for num_left in reversed(range(MAX_PORT_RACES + 1)):
            try:
                return await (self._start_own() if self.is_own else self._connect())
            except WorkerStartError as error:
                if not (num_left and _lost_port(error.log_tail)):
                    raise
                logger.warning("%s starts again, on other ports: %s", self.name, error)

    async def _start_own(self) -> None:
        handle = self._handle
        instance = ServerInstance(free_port(), self._api_key, is_cuda=self._is_cuda)
        async with AsyncExitStack() as undo:
            process = await ServerProcess.start(handle, instance, self._log_path)
            undo.push_async_callback(process.kill)
            self.url = process.url
            client = handle.connect(self.url, self._api_key)
            undo.push_async_callback(client.close)
            await process.wait_ready(client, handle.servers.start_timeout_s)
            await self._ask_abilities(client)
            await client.set_version(0)
            if handle.config.lora.is_published_alone:
                client.adapter = ServedAdapter("", 0)
            undo.pop_all()
        self.process = process
        self._begin(client)

    async def _connect(self) -> None:
        handle, key_variable = self._handle, self._handle.servers.api_key_env
        key = os.environ.get(key_variable, "") if key_variable else ""
        async with AsyncExitStack() as undo:
            client = handle.connect(self.url, key)
            undo.push_async_callback(client.close)
            try:
                await self._resume_soon(client)  # an earlier run may have left it paused
                await self._ask_abilities(client)
                self.version = await self._find_version(client)
            except (PeerLost, RpcTimeout, ProtocolError, EngineFailed) as error:
                raise ConfigError(
                    f"servers.urls: no {handle.name} server answers at {self.url} as one "
                    f"does ({error}); start it, or correct the URL"
                ) from error
            undo.pop_all()
        self._begin(client)

    async def _resume_soon(self, client: ServerClient) -> None:
        """Waits for a server that may be starting again; in a worker's first life the URL is wrong.

        Raises: PeerLost, RpcTimeout: what its last failure was.
        """
        wait_s = 0.0 if self._handle.is_first_life else self._handle.servers.start_timeout_s
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return await client.resume()
            except (PeerLost, RpcTimeout):
                if time.monotonic() >= deadline:
                    raise
                await asyncio.sleep(_RECONNECT_POLL_S)

    async def _ask_abilities(self, client: ServerClient) -> None:
        config = self._handle.config
        client.abilities = await client.ask_abilities()
        client.abilities.check(self.url, config.path, config.max_context_tokens)
        if config.routing_replay and not client.abilities.tells_routes:
            raise ConfigError(
                f"actor.routing_replay: {self.url} does not tell the experts of tokens; start "
                "SGLang with --enable-return-routed-experts"
            )

    def _begin(self, client: ServerClient) -> None:
        servers = self._handle.servers
        self._client = client
        self._watch = ServerWatch(client, self.process, servers, self._doubt, self._trust)
        self._following = asyncio.create_task(self._follow(self._watch), name="server watch")
        logger.info("server=%s version=%s abilities=%s", self.url, self.version, client.abilities)

    async def _follow(self, watch: ServerWatch) -> str:
        """Ends everything of the server once it is lost; returns why it is."""
        try:
            reason = await watch.run()
        except Exception as error:  # the task's end: nothing may rely on the server any more
            logger.exception("%s is watched no more", self.name)
            reason = f"watching it failed: {error!r}"
        lost = EngineFailed(f"{self.name} at {self.url} is lost: {reason}")
        logger.error("%s", lost)
        await self._end(lost)
        return str(lost)

    async def wait_until_lost(self) -> str:
        """Returns why the server, which was started, is lost, when all of it has ended."""
        assert self._following, "awaited once it is started"
        return await asyncio.shield(self._following)

    async def close(self, failure: ArealError) -> None:
        """Ends the server if it is ours; one of others generates again if it is paused.

        Args:
            failure: ends all requests.
        """
        if self._following is not None:
            await cancel_all([self._following])
        if not self.is_own and self._client is not None:
            with suppress(ArealError):
                await self.resume()
        await self._end(failure, is_gentle=True)

    async def _end(self, failure: ArealError, *, is_gentle: bool = False) -> None:
        self.places.fail(failure)
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        process, self.process = self.process, None
        if process is not None:
            await (process.stop() if is_gentle else process.kill())

    def open(self) -> None:
        """Requests may take places."""
        self._is_held = False
        self._admit()

    def hold(self) -> None:
        """No request takes a place until `open`; those that have one go on."""
        self._is_held = True
        self._admit()

    def _doubt(self) -> None:
        """Nothing is placed there before it has answered."""
        if not self._is_doubted:
            logger.warning("%s at %s does not answer: requests wait", self.name, self.url)
        self._is_doubted = True
        self._admit()

    async def _trust(self) -> None:
        """It has answered. Somebody else's may have been started again meanwhile."""
        if not self._is_doubted or (self._watch is not None and self._watch.is_updating):
            return
        if not self.is_own and await self._find_version(self.client) != self.version:
            self.lose("it has other weights than it was given: it was started again")
            return
        self._is_doubted = False
        self._admit()

    def _admit(self) -> None:
        self.places.set_open(not (self._is_held or self._is_doubted))

    def lose(self, reason: str) -> EngineFailed:
        """The server is of no use any more, and ends; returns what to raise."""
        self.hold()
        if self._watch is not None:
            self._watch.fail(reason)
        return EngineFailed(f"{self.name} is lost: {reason}")

    @contextmanager
    def needed_for(self, what: str) -> Iterator[None]:
        """Within the context the server must do as it is told; otherwise it is lost.

        Raises: EngineFailed: it did not.
        """
        try:
            yield
        except BaseException as error:
            lost = self.lose(f"{what} failed: {str(error) or type(error).__name__}")
            if isinstance(error, ArealError):
                raise lost from error
            raise

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[ServerClient]:
        """The client, for one request. A server that loses it is doubted, and asked at once.

        Raises: PeerLost: the request is lost: with its connection, or as the server refuses it and
            its computing process is gone.
        """
        client = self.client
        try:
            yield client
        except (EngineFailed, PeerLost) as error:
            if isinstance(error, EngineFailed) and await _answers(client):
                raise
            if self._watch is not None and self._client is client:  # it is not known to be lost
                self._doubt()
                self._watch.suspect()
            raise PeerLost(f"{self.name} has failed: {error}") from error

    def max_support(self, sampling: GenerationConfig) -> int:
        """Largest number of tokens that a truncated distribution of a request may have.

        Raises: ConfigError: none, or fewer than are asked for.
        """
        limit = self.client.abilities.max_support
        if limit == 0:
            raise ConfigError(
                f"{self.url} gives no log-probabilities under top_p and top_k: set "
                "generation.top_p to 1 and generation.top_k to 0, or use a newer "
                f"{self._handle.name}"
            )
        if sampling.top_k > limit:
            raise ConfigError(
                f"generation.top_k is {sampling.top_k}, but {self.url} has a limit of {limit}: set "
                f"{self._handle.support_setting}"
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
                # a server forgets which experts of old weights tokens of held requests had
                forgets = self._handle.config.routing_replay
                holds = self.client.abilities.has_version_spans and not forgets
                await self.client.pause(holds_requests=holds)
            else:
                await self._end_answers()
            self.is_paused = True

    async def sleep(self) -> None:
        """Answers all requests with what they have, and gives up weights and KV cache."""
        if self.is_asleep:
            return
        self.hold()
        if not self.is_paused:
            self.num_pauses += 1
            await self.client.pause(holds_requests=False)
            self.is_paused = True
        await self._end_answers()  # those that a pause has held
        with self.updating():
            await self.client.sleep()
        self.is_asleep = True

    async def wake(self) -> None:
        """It can load weights; `take_cache` follows when it has them."""
        if self.is_asleep:
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
        limit_s = self._handle.servers.control_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                while not self.places.is_empty.is_set():
                    await self.client.abort_all()
                    with suppress(TimeoutError):  # one may have arrived after that
                        await asyncio.wait_for(self.places.is_empty.wait(), _ABORT_AGAIN_S)
        except TimeoutError as error:
            raise RpcTimeout(f"{self.name} did not end its answers within {limit_s:g} s") from error

    async def resume(self) -> None:
        """Running requests go on; `open` lets new ones in."""
        if self.is_paused:
            if self.client.adapter is None:
                await self.client.resume()
            self.is_paused = False

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Within the context the server may be silent, as it loads weights."""
        assert self._watch is not None, "it was started"
        self._watch.set_updating(True)
        try:
            yield
        finally:
            self._watch.set_updating(False)

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

    async def _find_version(self, client: ServerClient) -> int:
        """Version of a server that somebody else has started: 0 when it has the model folder's
        weights, as far as that can be told."""
        version, served = await client.served_weights()
        if version != 0:
            return UNKNOWN_VERSION if version is None else version
        config = self._handle.config
        if not _is_same_folder(served, config.path):
            if config.weight_update.method == WeightUpdateMethod.disk:
                return UNKNOWN_VERSION  # it sees the model folder, and loads it
            logger.warning(
                "server=%s serves %s: it has to hold the weights of %s",
                self.url,
                served,
                config.path,
            )
        await client.set_version(0)
        return 0


async def _answers(client: ServerClient) -> bool:
    """Whether the process that computes does."""
    try:
        await client.probe(timeout_s=_PROBE_TIMEOUT_S)
    except (ArealError, TimeoutError):
        return False
    return True


def _is_same_folder(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def _lost_port(log_tail: Sequence[str]) -> bool:
    """Whether the end of a server's log says that another process has taken a port of it."""
    return any("address already in use" in line.lower() for line in log_tail)
