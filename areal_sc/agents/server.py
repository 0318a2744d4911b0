"""The address of a worker's sessions: HTTP to calls, and answers back. No torch.

consumes     requests of agents, each with the key of its session
waits for    the clients, and the sessions' answers
unblocked by the worker, which generates on its own event loop; at the end `close`

    agent -- HTTP --> this loop: dialect, session, templates --> the worker's loop: generate

It is a loop on a thread of its own, as a body of megabytes would hold up the worker's. Both
begin with the first session.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec
from aiohttp import web

from areal_sc.agents.calls import CallRefused, Dialect, ModelCall, anew
from areal_sc.agents.certificate import make_certificate
from areal_sc.agents.claims import Claims, Offer, id_of, named_by
from areal_sc.agents.http import (
    BACKLOG,
    COME_BACK_S,
    DELIVERY,
    DIALECTS,
    MAX_BODY_BYTES,
    UNDELIVERED,
    Handler,
    attempt_in,
    decoded,
    key_in,
    no_session,
    read_body,
    refuse_path,
    refusing,
    runner_of,
    though_client_goes,
    wait_for_last_byte,
)
from areal_sc.agents.journal import Record, SessionJournal
from areal_sc.agents.keys import SessionKeys, SessionName
from areal_sc.agents.pictures import PictureEngine
from areal_sc.agents.routes import AgentsAt
from areal_sc.agents.rows import Rewards
from areal_sc.agents.session import (
    SESSION_ENDED,
    SESSION_RETURNS,
    Session,
    SessionSettings,
    given_up,
)
from areal_sc.agents.session_call import SessionCall
from areal_sc.engines.base import Completion, OnTokens
from areal_sc.errors import WorkerError
from areal_sc.transport.sockets.interface import Interface, bracketed, family_of
from areal_sc.user_code import EpisodeClock

if TYPE_CHECKING:
    from areal_sc.config.agent_settings import AgentsConfig
    from areal_sc.config.schema import GenerationConfig
    from areal_sc.engines.picture_processor import PictureProcessor

T = TypeVar("T")

logger = logging.getLogger(__name__)

_HOST: Final = "127.0.0.1"
_STREAM_HEADERS: Final = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
}
_START_TIMEOUT_S: Final = 60.0
_END_TIMEOUT_S: Final = 10.0
_LOOK_S: Final = 0.1
_MAX_LOST: Final = 256
"""Sessions of which is remembered that they were given up; of older ones, that they ended."""


class AgentServer:
    """Serves the sessions of one life of a worker to agents on its machine.

    Args:
        worker: its name.
        life: its incarnation.
        secret: of all sessions of the run; b"": of these alone.
        is_kept: whether the journal of an episode of an earlier life, by its id, is there.

    Attributes:
        clock: of the limits of their episodes.
        port: of 127.0.0.1, once a session was open.
    """

    def __init__(
        self,
        worker: str,
        life: str = "0",
        secret: bytes = b"",
        is_kept: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self.clock = EpisodeClock()
        self._worker = worker
        self._life = life
        self._keys = SessionKeys(secret)
        self._is_kept = is_kept
        self._claims = Claims(self._keys, self._session_named, self._rename, self.clock)
        self._naming = threading.Lock()  # sessions begin and end on another thread than claims
        self._num_opened = 0
        self._sessions = dict[SessionName, Session]()
        self._returning = dict[SessionName, tuple[Session, list[Record]]]()  # not offered again yet
        self._lost = dict[SessionName, CallRefused]()  # of the last sessions that were given up
        self._passer = ""  # the process of the run's address
        self._starting: asyncio.Task[None] | None = None
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ending: asyncio.Event | None = None
        self._runner: web.AppRunner | None = None
        self._sites = dict[socket.socket, web.SockSite]()
        self._listening: asyncio.Task[tuple[int, str]] | None = None
        self._sending = set[asyncio.Task[None]]()
        self.port = 0

    @asynccontextmanager
    async def open(
        self,
        engine: PictureEngine,
        sampling: GenerationConfig,
        settings: SessionSettings,
        journal: SessionJournal | None = None,
    ) -> AsyncIterator[Session]:
        """A session, until the block ends. Its calls are generated on the caller's event loop.

        Args:
            journal: of the session; one that has begun in an earlier life of the worker goes on
                from there, and can be found once it is offered.
        Raises: WorkerError: the thread could not begin, as there is no free port, say; the next
            session tries it again.
        """
        await self._started()
        session = Session(_EngineOnItsLoop(engine), sampling, settings, journal)
        if path := session.journal.path:
            written = await asyncio.to_thread(session.journal.read)
            await self._on_thread(session.restore(written))
            name = named_by(path.name)
            self._returning[name] = session, written
        else:
            with self._naming:
                name = self._new_name(session)
        lost: CallRefused | None = None
        try:
            session.base_url = f"http://{_HOST}:{self.port}/v1"
            session.api_key = self._keys.key_of(name)
            with session.raising():
                yield session
        except BaseException as error:
            lost = given_up(error, session.journal)
            raise
        finally:
            with self._naming:
                names = (it for it, open_ in self._sessions.items() if open_ is session)
                name = next(names, name)
                self._sessions.pop(name, None)
                self._returning.pop(name, None)
            if lost or name.life != self._life:
                self._note_lost(name, lost or SESSION_ENDED)
            self._soon(partial(session.end, lost))

    async def wait_outside(self, key: str, row: Any, config: AgentsConfig) -> Rewards:
        """Offers an open session to agents outside until one has rewarded it.

        Args:
            row: as JSON holds it.
        Raises: AgentError: it was rejected, or came to a limit.
        """
        return await self._on_thread(self._offer(key, row, config))

    async def reachable(self, interface: Interface) -> AgentsAt:
        """Where the process that has the run's address reaches this: by TLS, unless on loopback.

        Raises: WorkerError: see `open`. OSError: the interface cannot be listened on.
        """
        await self._started()
        if ipaddress.ip_address(interface.host).is_loopback:
            return AgentsAt(self._life, f"http://{_HOST}:{self.port}")
        if self._listening is None or (self._listening.done() and self._listening.exception()):
            self._listening = asyncio.create_task(self._on_thread(self._listen(interface.host)))
        port, fingerprint = await asyncio.shield(self._listening)
        host = bracketed(interface.advertised_host)
        return AgentsAt(self._life, f"https://{host}:{port}", fingerprint)

    async def close(self) -> None:
        """Refuses all calls of open sessions, and ends the thread."""
        if self._starting is None:
            return
        await asyncio.wait([self._starting])
        if self._thread and self._is_ending:
            self._soon(self._is_ending.set)
            await asyncio.to_thread(self._thread.join, _END_TIMEOUT_S)
            if self._thread.is_alive():
                logger.warning("the thread of agents' calls hangs, and is left behind")

    def _soon(self, call: Callable[[], None]) -> None:
        """Has the thread's loop make a call, unless it has ended with all sessions."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call)

    async def serve_on(self, listener: socket.socket) -> None:
        """Takes connections of this socket, too, until `leave`."""
        await self._on_thread(self._begin_site(listener))

    async def leave(self, listener: socket.socket) -> None:
        """Closes a socket that is served."""
        if (site := self._sites.pop(listener, None)) and self._loop and not self._loop.is_closed():
            await self._on_thread(site.stop())

    async def _on_thread(self, asked: Coroutine[Any, Any, T]) -> T:
        assert self._loop is not None
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))

    async def _offer(self, key: str, row: Any, config: AgentsConfig) -> Rewards:
        name = self._keys.read(key)
        assert name is not None
        written = list[Record]()
        with self._naming:
            if name in self._returning:
                self._sessions[name], written = self._returning.pop(name)
        session = await self._session_named(name)
        return await self._claims.wait(Offer(name, row, session, written), config)

    async def _listen(self, host: str) -> tuple[int, str]:
        assert self._runner is not None
        context, fingerprint = make_certificate()
        listener = socket.create_server((host, 0), family=family_of(host), backlog=BACKLOG)
        await web.SockSite(self._runner, listener, ssl_context=context).start()
        return listener.getsockname()[1], fingerprint

    async def _begin_site(self, listener: socket.socket) -> None:
        assert self._runner is not None
        self._sites[listener] = web.SockSite(self._runner, listener)
        await self._sites[listener].start()

    def _new_name(self, session: Session) -> SessionName:
        self._num_opened += 1
        name = SessionName(self._worker, self._life, self._num_opened)
        self._sessions[name] = session
        return name

    def _rename(self, name: SessionName) -> SessionName:
        with self._naming:
            session = self._sessions.pop(name, None)
            return self._new_name(session) if session else name  # which has just ended

    def _note_lost(self, name: SessionName, why: CallRefused) -> None:
        self._lost[name] = why
        while len(self._lost) > _MAX_LOST:
            del self._lost[next(iter(self._lost))]

    async def _started(self) -> None:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(), name="agent server")
        await asyncio.shield(self._starting)

    async def _start(self) -> None:
        started: Future[int] = Future()

        def run() -> None:
            try:
                with asyncio.Runner() as runner:
                    runner.run(self._serve(started))
            except BaseException as error:  # the thread's end: whoever waits is told
                if started.done():
                    raise
                started.set_exception(RuntimeError(repr(error)))

        try:
            self._thread = threading.Thread(target=run, name="agents", daemon=True)
            self._thread.start()
            async with asyncio.timeout(_START_TIMEOUT_S):
                self.port = await asyncio.wrap_future(started)
        except Exception as error:
            self._starting = None
            raise WorkerError(f"no address for agents could be opened: {error!r}") from error
        logger.info("agents reach this worker at http://%s:%d/v1", _HOST, self.port)

    async def _serve(self, started: Future[int]) -> None:
        """The whole life of the thread's event loop."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, self._handler(dialect))
        app.router.add_post(UNDELIVERED, refusing(self._note_undelivered))
        self._claims.add_routes(app.router)
        paths = ", ".join(f"POST {dialect.path}" for dialect in DIALECTS)
        app.router.add_route("*", "/{path:.*}", refuse_path(paths))
        runner = await runner_of(app)
        await web.TCPSite(runner, _HOST, 0, backlog=BACKLOG).start()
        self._loop, self._runner = asyncio.get_running_loop(), runner
        self._is_ending = asyncio.Event()
        started.set_result(runner.addresses[0][1])
        await self._is_ending.wait()
        for session in list(self._sessions.values()):
            session.end(CallRefused(410, "session_lost", "the worker of this episode ends"))
        await runner.cleanup()

    def _handler(self, dialect: Dialect) -> Handler:
        return refusing(partial(self._answer, dialect), dialect)

    async def _answer(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        name = self._name_in(request)
        session = await self._session_named(name)
        self._note_passer(request.headers.get(DELIVERY, "").partition("-")[0])
        self._claims.confirm(name)
        try:
            body = await read_body(request)
            call = dialect.read(decoded(body))
        except CallRefused as refused:
            session.note_refused(refused)
            raise
        begun = session.begin(
            call,
            digest=_digest(dialect.path, body),
            key=request.headers.get("Idempotency-Key", ""),
            attempt=attempt_in(request),
        )
        call = session.as_sampled(call)
        with begun.client():
            if call.is_streamed:
                return await self._stream(dialect, request, call, begun)
            answer = await begun.answer()
            body = msgspec.json.encode(dialect.write(call, answer))
            response = web.Response(body=body, content_type="application/json")
            return await self._send(request, response, begun)

    async def _stream(
        self, dialect: Dialect, request: web.Request, call: ModelCall, begun: SessionCall
    ) -> web.StreamResponse:
        """Begins with the first text, so that a call which is refused has its own status."""
        stream = dialect.stream(call, begun.answer_id, begun.created_s)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        async for text in begun.texts():
            opening = [] if response.prepared else stream.opening()
            await response.prepare(request)
            await response.write(b"".join((*opening, *stream.text(text))))
        opening = [] if response.prepared else stream.opening()
        try:
            answer = await begun.answer()
        except CallRefused as refused:
            if not response.prepared:
                raise
            await response.write_eof(b"".join(stream.fail(refused)))
            return response
        return await self._send(
            request, response, begun, b"".join((*opening, *stream.rest(answer)))
        )

    async def _send(
        self,
        request: web.Request,
        response: web.StreamResponse,
        begun: SessionCall,
        rest: bytes = b"",
    ) -> web.StreamResponse:
        """Sends the rest of an answer, and notes whether the system has taken its last byte."""
        wait_for_last_byte(request)

        async def send() -> None:
            with (
                suppress(ConnectionError),
                begun.delivering(request.headers.get(DELIVERY, "")),
            ):
                await response.prepare(request)
                await response.write_eof(rest)

        await though_client_goes(send(), self._sending)
        return response

    async def _note_undelivered(self, request: web.Request) -> web.StreamResponse:
        delivery = request.headers.get(DELIVERY, "")
        (await self._session_named(self._name_in(request))).note_undelivered(delivery)
        return web.Response()

    def _note_passer(self, passer: str) -> None:
        """Answers that another process has passed on may not have come to their clients."""
        if passer and passer != self._passer:
            self._passer = passer
            for session in list(self._sessions.values()):
                session.note_unsure()

    def _name_in(self, request: web.Request) -> SessionName:
        """Raises: CallRefused: 401: the request has no key of a session."""
        if (name := self._keys.read(key_in(request))) is None:
            raise no_session()
        return name

    async def _session_named(self, name: SessionName) -> Session:
        """Waits for one that an earlier life has had, `COME_BACK_S` at most.

        Raises: CallRefused: 404, 409 or 410: it never was, has ended, or was given up or lost. 503:
            it is not back yet.
        """
        is_own = (name.worker, name.life) == (self._worker, self._life)
        if is_own and name.number > self._num_opened:
            raise CallRefused(404, "unknown_episode", "no episode has this id")
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + COME_BACK_S
        while (session := self._sessions.get(name)) is None:
            ended = self._lost.get(name, SESSION_ENDED if is_own else SESSION_RETURNS)
            if ended.status != SESSION_RETURNS.status:
                raise anew(ended)
            if name.worker != self._worker or not self._is_kept(id_of(name)):
                why = f"the memory of the worker {name.worker} of this episode is gone"
                raise CallRefused(410, "session_lost", why)
            if loop.time() > give_up_s:
                raise anew(SESSION_RETURNS)
            await asyncio.sleep(_LOOK_S)
        return session


class _EngineOnItsLoop:
    """An engine that is asked from the loop of another thread."""

    def __init__(self, engine: PictureEngine) -> None:
        self.tokenizer = engine.tokenizer
        self.max_context_tokens = engine.max_context_tokens
        self.end_token_ids = engine.end_token_ids
        self._engine = engine
        self._loop = asyncio.get_running_loop()

    @property
    def processor(self) -> PictureProcessor | None:
        return self._engine.processor

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig | None = None,
        *,
        on_tokens: OnTokens | None = None,
        pictures: Sequence[bytes] | None = None,
    ) -> Completion:
        loop = asyncio.get_running_loop()

        def tell(token_ids: Sequence[int]) -> None:
            assert on_tokens is not None
            loop.call_soon_threadsafe(on_tokens, list(token_ids))

        with_pictures: dict[str, Any] = {"pictures": pictures} if pictures else {}
        asked = self._engine.generate(
            input_ids, sampling, on_tokens=None if on_tokens is None else tell, **with_pictures
        )
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asked, self._loop))


def _digest(path: str, body: bytes) -> str:
    return hashlib.blake2b(path.encode() + b" " + body, digest_size=16).hexdigest()
