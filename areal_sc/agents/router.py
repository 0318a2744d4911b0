"""The process that has the address of a run, and passes calls on to the worker of their key.

consumes     requests of agents outside; from the script, where the workers are
waits for    the clients and the workers; after a worker's death, for its next life
unblocked by both; the process ends with its standard input, so with the script

    agent -- HTTP --> key: which life of which worker --> HTTP --> the sessions of that worker
      /v1/...               by a key of a session, which may outlive its worker's life
      POST /episodes        by the key of the run: the first worker that has an episode
      /episodes/ID/...      by the key of the run, the worker that ID names

Of a request it keeps nothing but the Idempotency-Key of a claim, with the worker that was asked.
What is sent on is made anew from what was understood: a path that is known, a few headers, and the
whole body. Answers pass through as they come, and no faster than they
are taken. It is a process of its own: a busy script does not hold up answers, answers do not hold
up the script, and what reads the bytes of strangers has no other secret of the run.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from areal_sc.agents.calls import CallRefused
from areal_sc.agents.claims import (
    CLAIM_S,
    CONFIRM,
    ENDS,
    EPISODES,
    check_run_key,
    id_of,
    named_by,
    no_episode,
)
from areal_sc.agents.http import (
    BACKLOG,
    COME_BACK_S,
    DELIVERY,
    DIALECTS,
    MAX_BODY_BYTES,
    RETRY_COUNT,
    UNDELIVERED,
    answer_of,
    key_in,
    no_session,
    read_body,
    refuse_path,
    refusing,
    runner_of,
    though_client_goes,
    wait_for_last_byte,
)
from areal_sc.agents.keys import SessionKeys, SessionName
from areal_sc.agents.routes import AgentsAt, RouterStart, RouterStarted, Routes
from areal_sc.log import setup_logging
from areal_sc.system.process import (
    allow_open_files,
    leave_signals_to_script,
    name_process,
    tell_starter,
)
from areal_sc.transport.sockets.interface import family_of

logger = logging.getLogger(__name__)

NEWS_S: Final = 10.0
"""After so long without news, a worker that was not reached may be reached where it was."""
_PROCESS: Final = secrets.token_hex(8)
_COME_AGAIN_S: Final = 1.0
_MAX_CLAIM_KEYS: Final = 4096
_CONNECT_S: Final = 10.0
_PORT_S: Final = 5.0
"""The process of a script that was killed leaves its port in far less."""
_LOOK_S: Final = 0.1
_MAX_LINE_BYTES: Final = 256 << 20

_ASKED: Final = ("Authorization", "x-api-key", "Idempotency-Key", RETRY_COUNT)
_ANSWERED: Final = ("Content-Type", "Cache-Control", "Retry-After", "x-should-retry")


class Router:
    """Finds the worker of each request, and passes it on."""

    def __init__(self, keys: SessionKeys, routes: Routes, client: aiohttp.ClientSession) -> None:
        self._keys = keys
        self._routes = routes
        self._client = client
        self._news = asyncio.Event()
        self._last_claimed = ""
        self._asked = dict[str, str]()  # which worker, by the Idempotency-Key of a claim
        self._silent_until_s = dict[str, float]()  # workers that let a claim wait
        self._under_way = dict[asyncio.Timeout, tuple[str, AgentsAt]]()
        self._passing = set[asyncio.Task[None]]()

    def application(self) -> web.Application:
        """All that is served."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for dialect in DIALECTS:
            call = partial(self._call, path=dialect.path)
            app.router.add_post(dialect.path, refusing(call, dialect))
        app.router.add_post(EPISODES, refusing(self._claim))
        for end in ENDS:
            path = f"{EPISODES}/{{id}}/{end}"
            app.router.add_post(path, refusing(partial(self._end, end=end)))
        paths = ", ".join(f"POST {path}" for path in (*(it.path for it in DIALECTS), EPISODES))
        app.router.add_route("*", "/{path:.*}", refuse_path(paths))
        return app

    def take_routes(self, routes: Routes) -> None:
        """Workers are elsewhere from now on, or have left."""
        self._routes = routes
        self._silent_until_s.clear()
        self._news.set()
        self._news = asyncio.Event()
        for limit, (worker, at) in self._under_way.items():
            if routes.up.get(worker) != at and not limit.expired():
                limit.reschedule(0)

    async def _call(self, request: web.Request, path: str) -> web.StreamResponse:
        if (name := self._keys.read(key_in(request))) is None:
            raise no_session()
        return await self._pass_on(request, name, path)

    async def _end(self, request: web.Request, end: str) -> web.StreamResponse:
        check_run_key(self._keys, request)
        name = named_by(request.match_info["id"])
        return await self._pass_on(request, name, f"{EPISODES}/{id_of(name)}/{end}")

    async def _claim(self, request: web.Request) -> web.StreamResponse:
        check_run_key(self._keys, request)
        await read_body(request)
        claim_key = request.headers.get("Idempotency-Key", "")
        for worker, at in list(self._in_turn(claim_key)):
            if self._silent_until_s.get(worker, 0.0) > _now():
                continue
            if claim_key:
                self._note_asked(claim_key, worker)
            try:
                async with asyncio.timeout(CLAIM_S):
                    answer = await self._post(at, EPISODES, _told_by(request), b"")
                    found = await answer.json()
            except TimeoutError:
                self._silent_until_s[worker] = _now() + CLAIM_S
                continue
            except (aiohttp.ClientError, OSError):
                continue  # it is gone
            if answer.status == 200:
                self._last_claimed = worker
                url = f"{request.scheme}://{request.host}/v1"
                response = answer_of({**found, "base_url": url})
                giving = self._give(request, response, at, found["id"])
                await though_client_goes(giving, self._passing)
                return response
        raise no_episode()

    def _in_turn(self, claim_key: str) -> Iterator[tuple[str, AgentsAt]]:
        """The workers: who was asked by the key before, then from behind the last that had one."""
        up, before = self._routes.up, self._asked.get(claim_key)
        turn = sorted(up, key=lambda it: (it != before, it <= self._last_claimed, it))
        return ((it, up[it]) for it in turn)

    def _note_asked(self, claim_key: str, worker: str) -> None:
        self._asked.pop(claim_key, None)
        self._asked[claim_key] = worker
        if len(self._asked) > _MAX_CLAIM_KEYS:
            del self._asked[next(iter(self._asked))]

    async def _give(
        self, request: web.Request, response: web.Response, at: AgentsAt, episode_id: str
    ) -> None:
        """Sends a claimed episode, and confirms the claim, which is void otherwise."""
        wait_for_last_byte(request)
        try:
            async with asyncio.timeout(CLAIM_S):
                await response.prepare(request)
                await response.write_eof()
                path = f"{EPISODES}/{episode_id}/{CONFIRM}"
                async with self._post(at, path, _told_by(request), b""):
                    pass
        except (aiohttp.ClientError, OSError) as error:
            logger.info("an episode was not handed over: %r", error)

    async def _pass_on(
        self, request: web.Request, name: SessionName, path: str
    ) -> web.StreamResponse:
        """Raises: CallRefused: 410 or 503: the worker is gone, or cannot be reached."""
        body = await read_body(request)
        headers = {**_told_by(request), DELIVERY: f"{_PROCESS}-{secrets.token_hex(8)}"}
        at: AgentsAt | None = None
        while True:
            at = await self._next_place(name, at)
            try:
                async with self._while_up(name.worker, at):
                    answer = await self._post(at, path, headers, body)
                break
            except (aiohttp.ClientError, OSError) as error:
                logger.info("worker=%s cannot be reached: %r", name.worker, error)
        told = {it: answer.headers[it] for it in _ANSWERED if it in answer.headers}
        response = web.StreamResponse(status=answer.status, headers=told)
        response.content_length = answer.content_length
        passing = self._pass_back(request, answer, response, name, at, headers)
        await though_client_goes(passing, self._passing)
        return response

    async def _pass_back(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        response: web.StreamResponse,
        name: SessionName,
        at: AgentsAt,
        headers: dict[str, str],
    ) -> None:
        """Sends an answer to the client; if it cannot have the whole, its worker is told."""
        wait_for_last_byte(request)
        try:
            async with self._while_up(name.worker, at), answer:
                await response.prepare(request)
                async for part in answer.content.iter_any():
                    await response.write(part)
                    await request.writer.drain()
        except (aiohttp.ClientError, OSError) as error:
            logger.info("an answer was not passed on: %r", error)
            if request.transport is not None:
                request.transport.abort()  # the client must not take what it has for the whole
            with suppress(aiohttp.ClientError, OSError):
                async with asyncio.timeout(CLAIM_S), self._post(at, UNDELIVERED, headers, b""):
                    pass
        else:
            with suppress(aiohttp.ClientError, OSError):
                await response.write_eof()

    def _post(
        self, at: AgentsAt, path: str, headers: dict[str, str], body: bytes
    ) -> aiohttp.client._RequestContextManager:
        seal: Any = aiohttp.Fingerprint(bytes.fromhex(at.fingerprint)) if at.fingerprint else True
        data = io.BytesIO(body)
        return self._client.post(f"{at.url}{path}", data=data, headers=headers, ssl=seal)

    async def _next_place(self, name: SessionName, before: AgentsAt | None) -> AgentsAt:
        """Where the worker is, but not where it was before; waits `COME_BACK_S` at most.

        Raises: CallRefused: 410 or 503: it has left, or is not there yet.
        """
        give_up_s = _now() + COME_BACK_S
        while (at := self._routes.up.get(name.worker)) is None or at == before:
            if at is None and name.worker not in self._routes.coming:
                told = f"the worker {name.worker} of this episode has left the run"
                raise CallRefused(410, "session_lost", told)
            try:
                async with asyncio.timeout_at(give_up_s if at is None else _now() + NEWS_S):
                    await self._news.wait()
            except TimeoutError:
                why = f"the worker {name.worker} of this episode cannot be reached now"
                raise CallRefused(
                    503, "worker_unreached", why, retry_after_s=_COME_AGAIN_S
                ) from None
        return at

    @asynccontextmanager
    async def _while_up(self, worker: str, at: AgentsAt) -> AsyncIterator[None]:
        """Ends the block with a TimeoutError once this life of the worker is lost.

        A machine that has died may have closed no connection.
        """
        is_up = self._routes.up.get(worker) == at
        async with asyncio.timeout(None if is_up else 0) as limit:
            self._under_way[limit] = worker, at
            try:
                yield
            finally:
                del self._under_way[limit]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _told_by(request: web.Request) -> dict[str, str]:
    return {it: request.headers[it] for it in _ASKED if it in request.headers}


async def _serve() -> None:
    told = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(told), sys.stdin
    )
    if not (line := await _whole_line(told)):
        return
    opening = msgspec.json.decode(line, type=RouterStart)
    connector = aiohttp.TCPConnector(limit=0)
    limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
    async with aiohttp.ClientSession(connector=connector, timeout=limits) as client:
        router = Router(SessionKeys(bytes.fromhex(opening.secret)), opening.routes, client)
        runner = await runner_of(router.application())
        try:
            listener = await _listener(opening)
        except OSError as error:
            tell_starter(msgspec.json.encode(RouterStarted(problem=error.strerror or str(error))))
            return
        await web.SockSite(runner, listener).start()
        tell_starter(msgspec.json.encode(RouterStarted(listener.getsockname()[1])))
        try:
            while line := await _whole_line(told):
                router.take_routes(msgspec.json.decode(line, type=Routes))
        finally:
            await runner.cleanup()


async def _whole_line(told: asyncio.StreamReader) -> bytes:
    """b"": the script has ended, in the midst of a line maybe."""
    line = await told.readline()
    return line if line.endswith(b"\n") else b""


async def _listener(opening: RouterStart) -> socket.socket:
    """Raises: OSError: the address cannot be had."""
    loop = asyncio.get_running_loop()
    port, give_up_s = opening.port, loop.time() + _PORT_S
    while True:
        try:
            address = opening.host, port
            return socket.create_server(address, family=family_of(opening.host), backlog=BACKLOG)
        except OSError as error:
            is_over = loop.time() > give_up_s
            if error.errno != errno.EADDRINUSE or (is_over and not opening.at_any_port):
                raise
            port = 0 if is_over else port
        await asyncio.sleep(_LOOK_S)


def main() -> None:
    """The process."""
    leave_signals_to_script()
    setup_logging("agents")
    name_process("agents")
    allow_open_files()
    asyncio.run(_serve())


if __name__ == "__main__":
    main()
