"""The Tinker API over HTTP: what its official client asks for, answered by `TinkerModels`.

    POST /api/v1/...   at once the id of a request; the work goes on
    retrieve_future    its answer, or after some seconds that it is still worked on

Requests name what they are by numbers of their client (`seq_id`), so one that is repeated is the
same one, also after the server was killed: see `journal`. Each key is a tenant's. All ids begin
with that of a session, which only the key opens that it was made with.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pydantic
from aiohttp import web
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from areal_sc.run.run_status import TenantStatus
from areal_sc.serving.answers import Answers, Work
from areal_sc.serving.journal import KeptRequest, Record, ServeJournal, WrittenReply
from areal_sc.serving.served_models import TinkerModels
from areal_sc.serving.wire import (
    MAX_BODY_BYTES,
    ApiAnswer,
    RequestRefused,
    cut_pass,
    head_of_pass,
    json_of,
    read_json,
    read_pass,
)
from areal_sc.system.durable import replace_file

B = TypeVar("B", bound=pydantic.BaseModel)

KEY_PREFIX: Final = "tml-"
"""Which the official client expects of a key."""
POLL_S: Final = 20.0
SILENT_S: Final = 60.0
"""A client tells every few seconds that it lives; of a whole model, one that is silent for so long
gives it up when another client wants one."""
GONE_S: Final = 86_400.0
"""A client that is silent for so long has gone: its models are no more."""
JOURNAL_BYTES: Final = 256 << 20
"""A larger one is written anew."""
MOST_RESTS: Final = 64
"""Folders that models rested in, which are deleted with what needs them."""
KEPT_BYTES: Final = 32 << 20
"""Of answers, the newest ones, which such a one has."""
_API: Final = "/api/v1"
_SESSION: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}")
_MAX_ROWS_A_PASS: Final = 1024
_OF_MODELS: Final = (
    *("create_model", "load_weights", "forward_backward", "optim_step", "save_weights"),
    "save_weights_for_sampler",
)
"""Requests that a server which was killed had to begin before its turns of the ranks."""

Serve = Callable[[bytes, str], ApiAnswer]
"""Serves a body of a tenant."""
Look = Callable[[web.Request, str], Awaitable[ApiAnswer]]
"""Serves a request of a tenant."""


class Numbered(pydantic.BaseModel):
    """What a request of a model says, whatever else is wrong with it."""

    model_id: str
    seq_id: int


def key_of(path: Path) -> str:
    """The key in a file that its owner alone can read; it is made where there is none."""
    with suppress(FileNotFoundError):
        return path.read_text().strip()
    key = f"{KEY_PREFIX}{secrets.token_urlsafe(24)}"
    with replace_file(path, mode=0o600) as file:
        file.write(key.encode())
    return key


class TinkerServer:
    """Answers clients that have a key.

    Args:
        models: are theirs.
        keys: by the names of their tenants.
        journal: gets what they ask for, and its answers.
        found: what an earlier server was asked for.

    Attributes:
        failed: by what it has ended, once it has.
    """

    def __init__(
        self,
        models: TinkerModels,
        keys: Mapping[str, str],
        journal: ServeJournal,
        found: list[Record],
    ) -> None:
        self._models = models
        self._keys = {tenant: key.encode() for tenant, key in keys.items()}
        self._journal = journal
        self._found = found
        answered = (it for it in found if isinstance(it, WrittenReply))
        known = {
            it.request_id: ApiAnswer(it.body, it.content_type, it.is_failure) for it in answered
        }
        self._answers = Answers(journal, known, models.ended_by)
        self.failed = self._answers.failed
        self._heard_s: dict[str, float] = {}  # of each session
        self._turns: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None  # of the journal, anew
        self._plain: dict[str, Serve] = {
            "client/config": self._config,
            "client/dynamic_config": lambda *_: json_of(types.ClientDynamicConfigResponse()),
            "telemetry": lambda *_: json_of(types.TelemetryResponse(status="accepted")),  # dropped
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._info,
            "weights_info": self._weights_info,
            "cancel_future": self._cancel,
        }
        self._kept: dict[str, Serve] = {
            "create_model": self._create_model,
            "load_weights": self._load,
            "unload_model": self._unload,
            "forward_backward": self._pass,
            "optim_step": partial(self._train, types.OptimStepRequest, models.take_step),
            "save_weights": partial(self._train, types.SaveWeightsRequest, models.save),
            "save_weights_for_sampler": partial(
                self._train, types.SaveWeightsForSamplerRequest, models.save_for_sampler
            ),
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }

    async def go_on(self) -> None:
        """Knows what an earlier server has done, has the ranks do it where they begin anew, and
        begins what it has left undone."""
        self._turns = asyncio.create_task(self._models.turns.run(), name="turns of the ranks")
        self._turns.add_done_callback(self._note_end)
        requests = [it for it in self._found if isinstance(it, KeptRequest)]
        self._found.clear()
        for is_first in (True, False):
            for it in requests:
                if (it.name in _OF_MODELS) is is_first:
                    with suppress(RequestRefused):  # of a sampler, say, whose weights are gone
                        self._kept[it.name](it.body, it.tenant)
            repeated = asyncio.create_task(self._models.turns.wait_until_repeated())
            ends: list[asyncio.Future[Any]] = [repeated, self.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            repeated.cancel()

    def _note_failure(self, writing: asyncio.Task[None]) -> None:
        if not writing.cancelled() and (error := writing.exception()) and not self.failed.done():
            self.failed.set_result(error)

    def _note_end(self, turns: asyncio.Task[None]) -> None:
        if not turns.cancelled() and not self.failed.done():
            self.failed.set_result(turns.exception() or AssertionError("turns do not end"))

    def application(self) -> web.Application:
        """All that is served."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for name, serve in self._plain.items():
            app.router.add_post(f"{_API}/{name}", self._answering(partial(_of_body, serve)))
        for name in self._kept:
            app.router.add_post(f"{_API}/{name}", self._answering(partial(self._keep, name)))
        app.router.add_post(f"{_API}/retrieve_future", self._answering(self._retrieve))
        looks: dict[str, Look] = {
            "healthz": _health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }
        for path, look in looks.items():
            app.router.add_get(f"{_API}/{path}", self._answering(look))
        app.router.add_route("*", "/{path:.*}", self._answering(_refuse))
        return app

    async def close(self) -> None:
        for task in (self._turns, self._writing):
            if task is not None:
                task.cancel()
        await self._answers.close()

    def tenants(self) -> list[TenantStatus]:
        """Whom it serves."""
        return [
            self._models.tenant_status(tenant, self._answers.num_answered[tenant])
            for tenant in self._keys
        ]

    def _answering(self, serve: Look) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                given = request.headers.get("X-API-Key", "").encode(errors="surrogateescape")
                equal = [
                    name for name, key in self._keys.items() if hmac.compare_digest(given, key)
                ]
                if not equal:
                    raise RequestRefused("X-API-Key: this is not the key of this server", 401)
                answer = await serve(request, equal[0])
            except RequestRefused as refused:
                told = {"error": str(refused), "message": str(refused)}
                return web.json_response(told, status=refused.status)
            return web.Response(body=answer.body, content_type=answer.content_type)

        return handle

    async def _keep(self, name: str, request: web.Request, tenant: str) -> ApiAnswer:
        """A request that a later server has to know, too."""
        body = await (_head_of(request) if name == "forward_backward" else request.read())
        answer = self._kept[name](body, tenant)  # raises, if it is no request
        self._journal.write(KeptRequest(name, body, tenant, answer.request_id))
        is_large = self._journal.size > JOURNAL_BYTES or self._models.turns.num_rests > MOST_RESTS
        if is_large and (self._writing is None or self._writing.done()):
            self._writing = asyncio.create_task(self._models.write_anew(self._kept_records))
            self._writing.add_done_callback(self._note_failure)
        return answer

    def _kept_records(self) -> list[Record]:
        """The newest answers, and requests that have none yet."""
        replies = self._answers.replies(KEPT_BYTES)
        records = self._journal.records()
        answered = {it.request_id for it in records if isinstance(it, WrittenReply)}
        requests = (it for it in records if isinstance(it, KeptRequest))
        return [
            *replies,
            *(it for it in requests if it.request_id and it.request_id not in answered),
        ]

    async def _retrieve(self, request: web.Request, tenant: str) -> ApiAnswer:
        asked = read_json(await request.read(), types.FutureRetrieveRequest)
        self._check_owner(asked.request_id, tenant)
        answer = await self._answers.wait_for(asked.request_id, POLL_S)
        if answer is None:
            return json_of(TryAgainResponse(request_id=asked.request_id, queue_state="active"))
        return answer

    def _cancel(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, Cancelled)
        self._check_owner(asked.request_id, tenant)
        if ":sample:" in asked.request_id:  # all others change something
            self._answers.cancel(asked.request_id)
        return json_of(types.TelemetryResponse(status="accepted"))

    def _begun(
        self,
        tenant: str,
        request_id: str,
        work: Work,
        model_id: str | None = None,
        ids: list[str] | None = None,
    ) -> ApiAnswer:
        self._answers.begin(request_id, work, tenant)
        future = types.UntypedAPIFuture(
            request_id=request_id, model_id=model_id, sample_sequence_ids=ids
        )
        return replace(json_of(future), request_id=request_id)

    def _config(self, *_: object) -> ApiAnswer:
        return json_of(
            types.ClientConfigResponse(
                fwdbwd_max_chunk_len=_MAX_ROWS_A_PASS, use_pyqwest_transport=False
            )
        )

    async def _capabilities(self, _: web.Request, __: str) -> ApiAnswer:
        served = types.SupportedModel(
            model_name=Path(self._models.name).name,
            max_context_length=self._models.limits.max_tokens,
            trainable=True,
            sampleable=True,
        )
        return json_of(types.GetServerCapabilitiesResponse(supported_models=[served]))

    # Sessions, of which all other ids begin with the id

    def _create_session(self, body: bytes, tenant: str) -> ApiAnswer:
        read_json(body, types.CreateSessionRequest)
        token = secrets.token_hex(8)
        return json_of(
            types.CreateSessionResponse(session_id=f"{token}-{self._seal(token, tenant)}")
        )

    def _seal(self, token: str, tenant: str) -> str:
        """So a later server knows that a session is one of its own, and whose."""
        return hmac.new(self._keys[tenant], token.encode(), hashlib.sha256).hexdigest()[:16]

    def _heartbeat(self, body: bytes, tenant: str) -> ApiAnswer:
        self._hear(read_json(body, types.SessionHeartbeatRequest).session_id, tenant)
        return json_of(types.SessionHeartbeatResponse())

    def _check_owner(self, name: str, tenant: str) -> None:
        """Raises: RequestRefused: the session that this id begins with is none of the tenant's."""
        session = name.removeprefix("tinker://").partition(":")[0]
        token, _, seal = session.partition("-")
        if not hmac.compare_digest(seal.encode(), self._seal(token, tenant).encode()):
            raise RequestRefused(f"there is no session {session!r:.200}", 404)

    def _hear(self, session: str, tenant: str) -> None:
        """Raises: RequestRefused: as `_check_owner`; or it is none that this server has made."""
        self._check_owner(session, tenant)
        if _SESSION.fullmatch(session) is None:  # it becomes the name of a folder
            raise RequestRefused(f"there is no session {session!r:.200}", 404)
        self._heard_s[session] = time.monotonic()

    def _is_silent(self, model_id: str, limit_s: float) -> bool:
        session = model_id.partition(":")[0]
        now = time.monotonic()
        return now > self._heard_s.setdefault(session, now) + limit_s

    # Models

    def _create_model(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.CreateModelRequest)
        self._hear(asked.session_id, tenant)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        self._end_those_gone()
        kept = KeptRequest("create_model", body, tenant, f"{model_id}:0")

        async def create(known: ApiAnswer | None) -> ApiAnswer:
            if why is not None:
                raise why
            if known is not None and known.is_failure:
                await self._models.unload(model_id, known)
                return known
            return await self._models.create(
                model_id,
                lambda other: self._is_silent(other, SILENT_S),
                lambda: None if known else self._journal.begin_anew([kept]),
            )

        why = self._refusal(
            lambda: self._models.begin(
                model_id, tenant, self._models.source_wanted(asked, model_id)
            )
        )
        return self._begun(tenant, f"{model_id}:0", create, model_id)

    def _load(self, body: bytes, tenant: str) -> ApiAnswer:
        """Into a model, or as the first request of a new one."""
        asked = read_json(body, types.LoadWeightsRequest)
        if asked.session_id is None:
            try:
                self._check_owner(asked.path, tenant)
            except RequestRefused as refused:
                return self._refused(asked, refused, tenant)
            return self._in_order(asked, partial(self._models.load, asked), tenant)
        self._check_owner(asked.path, tenant)
        self._hear(asked.session_id, tenant)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"

        async def load(_: ApiAnswer | None) -> ApiAnswer:
            if why is not None:
                raise why
            return json_of(types.LoadWeightsResponse(path=asked.path, model_id=model_id))

        def begin() -> None:
            self._models.check_base(asked.base_model or self._models.name)
            source = self._models.loaded_source(
                model_id, 0, asked.path, has_optimizer=asked.optimizer
            )
            self._models.begin(model_id, tenant, source)

        why = self._refusal(begin)
        return self._begun(tenant, f"{model_id}:0", load, model_id)

    def _refusal(self, begin: Callable[[], None]) -> RequestRefused | None:
        """Why a model does not begin, which its request is answered with."""
        try:
            begin()
        except RequestRefused as refused:
            return refused
        return None

    def _end_those_gone(self) -> None:
        for model_id in self._models.ids:
            if self._is_silent(model_id, GONE_S):
                body = types.UnloadModelRequest(model_id=model_id).model_dump_json().encode()
                tenant = self._models.tenant_of(model_id)
                self._unload(body, tenant)
                kept = KeptRequest("unload_model", body, tenant, f"{model_id}:unload")
                self._journal.write(kept)

    def _unload(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.UnloadModelRequest)
        self._check_owner(asked.model_id, tenant)
        self._models.check_id(asked.model_id)
        unload = partial(self._models.unload, asked.model_id)
        return self._begun(tenant, f"{asked.model_id}:unload", unload, asked.model_id)

    def _info(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.GetInfoRequest)
        self._check_owner(asked.model_id, tenant)
        self._models.check_id(asked.model_id)
        rank, name = self._models.rank_of(asked.model_id), Path(self._models.name).name
        return json_of(
            types.GetInfoResponse(
                model_id=asked.model_id,
                model_data=types.ModelData(model_name=name, tokenizer_id=self._models.name),
                model_name=name,
                is_lora=rank > 0,
                lora_rank=rank or None,
            )
        )

    def _weights_info(self, body: bytes, tenant: str) -> ApiAnswer:
        path = read_json(body, AskedWeights).tinker_path
        self._check_owner(path, tenant)
        rank = self._models.stored_source(path, has_optimizer=False).rank
        name = Path(self._models.name).name
        return json_of(types.WeightsInfoResponse(base_model=name, is_lora=True, lora_rank=rank))

    def _pass(self, body: bytes, tenant: str) -> ApiAnswer:
        try:
            asked = read_pass(body)
        except RequestRefused as refused:
            return self._refused(head_of_pass(body), refused, tenant)
        return self._in_order(asked, partial(self._models.run_pass, asked), tenant)

    def _train(
        self,
        kind: type[B],
        work: Callable[[Any, ApiAnswer | None], Awaitable[ApiAnswer]],
        body: bytes,
        tenant: str,
    ) -> ApiAnswer:
        try:
            asked = read_json(body, kind)
        except RequestRefused as refused:
            return self._refused(read_json(body, Numbered), refused, tenant)
        return self._in_order(asked, partial(work, asked), tenant)

    def _refused(self, asked: Any, why: RequestRefused, tenant: str) -> ApiAnswer:
        """At its turn: the requests behind it wait for its number."""
        refuse = partial(self._models.refuse, asked.model_id, asked.seq_id, str(why))
        return self._in_order(asked, refuse, tenant)

    def _in_order(self, asked: Any, work: Work, tenant: str) -> ApiAnswer:
        self._check_owner(asked.model_id or "", tenant)
        self._models.check_id(asked.model_id)
        if not asked.seq_id:
            raise RequestRefused("seq_id: expected a number above 0")
        self._models.expect(asked.model_id, asked.seq_id)
        return self._begun(tenant, f"{asked.model_id}:{asked.seq_id}", work, asked.model_id)

    # Samplers

    def _create_sampler(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.CreateSamplingSessionRequest)
        self._hear(asked.session_id, tenant)
        if asked.model_path is not None:
            self._check_owner(asked.model_path, tenant)
        session = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._models.open_sampler(session, asked)
        return json_of(types.CreateSamplingSessionResponse(sampling_session_id=session))

    async def _sampler(self, request: web.Request, tenant: str) -> ApiAnswer:
        session = request.match_info["sampler"]
        self._check_owner(session, tenant)
        self._models.check_sampler(session)
        base = Path(self._models.name).name
        return json_of(types.GetSamplerResponse(sampler_id=session, base_model=base))

    def _sample(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.SampleRequest)
        if asked.seq_id is None:
            raise RequestRefused("seq_id: expected a number, by which its answer is asked for")
        session = asked.sampling_session_id or ""
        self._check_owner(session, tenant)
        request_id = f"{session}:{asked.seq_id}"
        if not self._answers.knows(request_id):
            self._models.check_sampler(session)
        ids = [f"{request_id}:{number}" for number in range(min(asked.num_samples, 1024))]
        return self._begun(tenant, request_id, partial(self._models.sample, asked), ids=ids)


async def _head_of(request: web.Request) -> bytes:
    """A body; of one that is too large what it begins with, which says what it is of, and no
    more."""
    body = bytearray()
    async for part in request.content.iter_any():
        if len(body) <= MAX_BODY_BYTES:
            body += part
    return bytes(body) if len(body) <= MAX_BODY_BYTES else cut_pass(body)


class Cancelled(pydantic.BaseModel):
    """Body of a request to give another one up."""

    request_id: str


class AskedWeights(pydantic.BaseModel):
    """Body of a question about saved weights."""

    tinker_path: str


async def _of_body(serve: Serve, request: web.Request, tenant: str) -> ApiAnswer:
    return serve(await request.read(), tenant)


async def _health(_: web.Request, __: str) -> ApiAnswer:
    return json_of(types.HealthResponse(status="ok"))


async def _refuse(request: web.Request, _: str) -> ApiAnswer:
    raise RequestRefused(f"{request.method} {request.path:.200} is not served", 404)
