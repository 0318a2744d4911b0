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
from functools import partial
from pathlib import Path
from typing import Any, Final

import pydantic
from aiohttp import web
from msgspec.structs import replace
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from areal_sc.run.run_status import TenantStatus
from areal_sc.serving.answers import Answers, Work
from areal_sc.serving.journal import ApiAnswer, KeptRequest, Record, ServeJournal, Source
from areal_sc.serving.served_models import TinkerModels
from areal_sc.serving.trained_model import TrainedModel
from areal_sc.serving.wire import (
    MAX_BODY_BYTES,
    MAX_SAMPLES,
    RequestRefused,
    cut_pass,
    head_of_pass,
    json_of,
    read_json,
    read_pass,
)
from areal_sc.system.durable import replace_file

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
_AFTER_TURNS: Final = ("unload_model", "create_sampling_session", "asample")
"""Requests that a server which was killed begins once its turns of the ranks are repeated."""

Serve = Callable[[bytes, str], ApiAnswer]
"""Serves a body of a tenant."""
Train = Callable[[Any, ApiAnswer | None], Awaitable[ApiAnswer]]
"""Does what a request of a model asks for; see `Work`."""
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
        known = {it.request_id: it for it in found if isinstance(it, ApiAnswer)}
        self._answers = Answers(journal, known, models.ended_by)
        self.failed = self._answers.failed
        self._heard_s: dict[str, float] = {}  # of each session
        self._turns: asyncio.Task[None] | None = None
        self._writing: asyncio.Task[None] | None = None  # of the journal, anew
        self._plain: dict[str, Serve] = {
            "client/config": _config,
            "client/dynamic_config": lambda *_: json_of(types.ClientDynamicConfigResponse()),
            "telemetry": lambda *_: json_of(types.TelemetryResponse(status="accepted")),  # dropped
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._info,
            "weights_info": self._weights_info,
        }
        self._kept: dict[str, Serve] = {
            "create_model": self._create_model,
            "load_weights": self._load,
            "unload_model": self._unload,
            "forward_backward": partial(self._train, read_pass, head_of_pass, models.run_pass),
            "optim_step": self._training(types.OptimStepRequest, models.take_step),
            "save_weights": self._training(types.SaveWeightsRequest, models.save),
            "save_weights_for_sampler": self._training(
                types.SaveWeightsForSamplerRequest, models.save_for_sampler
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
        for is_last in (False, True):
            for it in requests:
                if (it.name in _AFTER_TURNS) is is_last:
                    with suppress(RequestRefused):  # of a sampler, say, whose weights are gone
                        self._kept[it.name](it.body, it.tenant)
            repeated = asyncio.create_task(self._models.turns.is_repeated.wait())
            ends: list[asyncio.Future[Any]] = [repeated, self.failed]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            repeated.cancel()

    def _note_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_result(error)

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
            self._writing.add_done_callback(self._note_end)
        return answer

    def _kept_records(self) -> list[Record]:
        """The newest answers, and requests that have none yet."""
        records = self._journal.records()
        done = {"", *(it.request_id for it in records if isinstance(it, ApiAnswer))}
        requests = (it for it in records if isinstance(it, KeptRequest))
        open_ones = [it for it in requests if it.request_id not in done]
        return [*self._answers.newest(KEPT_BYTES), *open_ones]

    async def _retrieve(self, request: web.Request, tenant: str) -> ApiAnswer:
        asked = read_json(await request.read(), types.FutureRetrieveRequest)
        self._check_owner(asked.request_id, tenant)
        answer = await self._answers.wait_for(asked.request_id, POLL_S)
        if answer is None:
            return json_of(TryAgainResponse(request_id=asked.request_id, queue_state="active"))
        return answer

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

    async def _capabilities(self, _: web.Request, __: str) -> ApiAnswer:
        served = types.SupportedModel(
            model_name=self._models.name,
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

    def _is_silent(self, model: TrainedModel, limit_s: float = SILENT_S) -> bool:
        now = time.monotonic()
        return now > self._heard_s.setdefault(model.session, now) + limit_s

    # Models

    def _create_model(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.CreateModelRequest)
        model_id = self._new_id(asked, tenant)
        for model in self._models.all_live:
            if self._is_silent(model, GONE_S):
                self._end_gone(model)
        kept = KeptRequest("create_model", body, tenant, f"{model_id}:0")
        return self._begin_model(
            model_id,
            tenant,
            lambda: self._models.source_wanted(asked, model_id),
            partial(self._models.create, model_id, self._is_silent, kept),
        )

    def _load(self, body: bytes, tenant: str) -> ApiAnswer:
        """Into a model, or as the first request of a new one."""
        asked = read_json(body, types.LoadWeightsRequest)
        if asked.session_id is None:

            def read(_: bytes) -> types.LoadWeightsRequest:
                self._check_owner(asked.path, tenant)
                return asked

            return self._train(read, lambda _: asked, self._models.load, body, tenant)
        self._check_owner(asked.path, tenant)
        model_id = self._new_id(asked, tenant)

        def source() -> Source:
            self._models.check_base(asked.base_model or self._models.name)
            return self._models.saved.kept_source(
                model_id, 0, asked.path, has_optimizer=asked.optimizer
            )

        async def load(_: ApiAnswer | None) -> ApiAnswer:
            return json_of(types.LoadWeightsResponse(path=asked.path, model_id=model_id))

        return self._begin_model(model_id, tenant, source, load)

    def _new_id(self, asked: Any, tenant: str) -> str:
        self._hear(asked.session_id, tenant)
        return f"{asked.session_id}:train:{asked.model_seq_id}"

    def _begin_model(
        self, model_id: str, tenant: str, source: Callable[[], Source], work: Work
    ) -> ApiAnswer:
        """Why a model does not begin is what its request is answered with."""
        try:
            self._models.begin(model_id, tenant, source())
        except RequestRefused as refused:
            work = partial(_refuse_begin, refused)
        return self._begun(tenant, f"{model_id}:0", work, model_id)

    def _end_gone(self, model: TrainedModel) -> None:
        body = types.UnloadModelRequest(model_id=model.model_id).model_dump_json().encode()
        answer = self._unload(body, model.tenant)
        self._journal.write(KeptRequest("unload_model", body, model.tenant, answer.request_id))

    def _unload(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.UnloadModelRequest)
        self._check_owner(asked.model_id, tenant)
        self._models.live(asked.model_id)
        unload = partial(self._models.unload, asked.model_id)
        return self._begun(tenant, f"{asked.model_id}:unload", unload, asked.model_id)

    def _info(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.GetInfoRequest)
        self._check_owner(asked.model_id, tenant)
        rank, name = self._models.live(asked.model_id).source.rank, self._models.name
        return json_of(
            types.GetInfoResponse(
                model_id=asked.model_id,
                model_data=types.ModelData(model_name=name, tokenizer_id=self._models.path),
                model_name=name,
                is_lora=rank > 0,
                lora_rank=rank or None,
            )
        )

    def _weights_info(self, body: bytes, tenant: str) -> ApiAnswer:
        path = read_json(body, AskedWeights).tinker_path
        self._check_owner(path, tenant)
        rank = self._models.saved.source(path, has_optimizer=False).rank
        return json_of(
            types.WeightsInfoResponse(base_model=self._models.name, is_lora=True, lora_rank=rank)
        )

    def _training(self, kind: type[pydantic.BaseModel], work: Train) -> Serve:
        read = partial(read_json, kind=kind)
        return partial(self._train, read, partial(read_json, kind=Numbered), work)

    def _train(
        self,
        read: Callable[[bytes], Any],
        read_head: Callable[[bytes], Any],
        work: Train,
        body: bytes,
        tenant: str,
    ) -> ApiAnswer:
        """A request of a model. One that cannot be read is refused at its turn: those behind it
        wait for its number."""
        try:
            asked = read(body)
        except RequestRefused as refused:
            asked, work = read_head(body), partial(self._models.refuse, refused)
        self._check_owner(asked.model_id or "", tenant)
        model = self._models.live(asked.model_id)
        if not asked.seq_id:
            raise RequestRefused("seq_id: expected a number above 0")
        model.order.expect(asked.seq_id)
        request_id = f"{model.model_id}:{asked.seq_id}"
        return self._begun(tenant, request_id, partial(work, asked), model.model_id)

    # Samplers

    def _create_sampler(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.CreateSamplingSessionRequest)
        self._hear(asked.session_id, tenant)
        if asked.model_path is not None:
            self._check_owner(asked.model_path, tenant)
        else:
            self._models.check_base(asked.base_model)
        session = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._models.samplers.open(session, asked.model_path)
        return json_of(types.CreateSamplingSessionResponse(sampling_session_id=session))

    async def _sampler(self, request: web.Request, tenant: str) -> ApiAnswer:
        session = request.match_info["sampler"]
        self._check_owner(session, tenant)
        self._models.samplers.check(session)
        path = self._models.path  # its client loads the tokenizer by it
        return json_of(types.GetSamplerResponse(sampler_id=session, base_model=path))

    def _sample(self, body: bytes, tenant: str) -> ApiAnswer:
        asked = read_json(body, types.SampleRequest)
        if asked.seq_id is None:
            raise RequestRefused("seq_id: expected a number, by which its answer is asked for")
        session = asked.sampling_session_id or ""
        self._check_owner(session, tenant)
        request_id = f"{session}:{asked.seq_id}"
        if not self._answers.knows(request_id):
            self._models.samplers.check(session)
        ids = [f"{request_id}:{number}" for number in range(min(asked.num_samples, MAX_SAMPLES))]
        return self._begun(
            tenant, request_id, partial(self._models.samplers.sample, asked), ids=ids
        )


async def _head_of(request: web.Request) -> bytes:
    """A body; of one that is too large what it begins with, which says what it is of, and no
    more."""
    body = bytearray()
    async for part in request.content.iter_any():
        if len(body) <= MAX_BODY_BYTES:
            body += part
    return bytes(body) if len(body) <= MAX_BODY_BYTES else cut_pass(body)


class AskedWeights(pydantic.BaseModel):
    """Body of a question about saved weights."""

    tinker_path: str


async def _refuse_begin(why: RequestRefused, _: ApiAnswer | None) -> ApiAnswer:
    raise why


async def _of_body(serve: Serve, request: web.Request, tenant: str) -> ApiAnswer:
    return serve(await request.read(), tenant)


def _config(*_: object) -> ApiAnswer:
    told = types.ClientConfigResponse(
        fwdbwd_max_chunk_len=_MAX_ROWS_A_PASS, use_pyqwest_transport=False
    )
    return json_of(told)


async def _health(_: web.Request, __: str) -> ApiAnswer:
    return json_of(types.HealthResponse(status="ok"))


async def _refuse(request: web.Request, _: str) -> ApiAnswer:
    raise RequestRefused(f"{request.method} {request.path:.200} is not served", 404)
