"""The Tinker API over HTTP: what its official client asks for, answered by a `TinkerModel`.

    POST /api/v1/...   at once the id of a request; the work goes on
    retrieve_future    its answer, or after some seconds that it is still worked on

Requests name what they are by numbers of their client (`seq_id`), so one that is repeated is the
same one, also after the server was killed: see `journal`. A session gives its model up when
it asks for another one, or its client is silent and another client wants to train.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import pydantic
from aiohttp import web
from tinker import types
from tinker.types.try_again_response import TryAgainResponse

from areal_sc.serving.answers import Answers, Work
from areal_sc.serving.journal import KeptRequest, ServeJournal, WrittenReply
from areal_sc.serving.served_model import TinkerModel
from areal_sc.serving.wire import ApiAnswer, RequestRefused, json_of, read_json, read_pass
from areal_sc.system.durable import replace_file

B = TypeVar("B", bound=pydantic.BaseModel)

MAX_BODY_BYTES: Final = 64 << 20
KEY_PREFIX: Final = "tml-"
"""Which the official client expects of a key."""
POLL_S: Final = 20.0
SILENT_S: Final = 60.0
"""A client tells every few seconds that it lives."""
_API: Final = "/api/v1"
_MAX_ROWS_A_PASS: Final = 1024
_IN_ORDER: Final = ("forward_backward", "optim_step", "save_weights", "save_weights_for_sampler")
"""Requests that wait for those with smaller numbers."""


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
    """Answers clients that have the key.

    Args:
        model: is theirs one after the other.
        key: of all of them.
        journal: what an earlier server was asked for.

    Attributes:
        failed: by what it has ended, once it has.
    """

    def __init__(self, model: TinkerModel, key: str, journal: ServeJournal) -> None:
        self._model = model
        self._key = key.encode()
        self._journal = journal
        self._found = journal.records()
        answered = (it for it in self._found if isinstance(it, WrittenReply))
        known = {
            it.request_id: ApiAnswer(it.body, it.content_type, it.is_failure) for it in answered
        }
        self._answers = Answers(journal, known, model.ended_by)
        self.failed = self._answers.failed
        self._heard_s: dict[str, float] = {}  # of each session
        self._plain: dict[str, Callable[[bytes], ApiAnswer]] = {
            "client/config": self._config,
            "client/dynamic_config": lambda _: json_of(types.ClientDynamicConfigResponse()),
            "telemetry": lambda _: json_of(types.TelemetryResponse(status="accepted")),  # dropped
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "get_info": self._info,
        }
        self._kept: dict[str, Callable[[bytes], ApiAnswer]] = {
            "create_model": self._create_model,
            "unload_model": self._unload,
            "forward_backward": self._pass,
            "optim_step": partial(self._train, types.OptimStepRequest, model.take_step),
            "save_weights": partial(self._train, types.SaveWeightsRequest, model.save),
            "save_weights_for_sampler": partial(
                self._train, types.SaveWeightsForSamplerRequest, model.save_for_sampler
            ),
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
        }

    async def go_on(self) -> None:
        """Begins what an earlier server has left undone, and knows what it has done."""
        for record in self._found:
            if not isinstance(record, KeptRequest):
                continue
            is_apart = record.name not in _IN_ORDER
            if is_apart:
                await self._answers.settle()
            with suppress(RequestRefused):  # of a sampler, say, whose weights are gone
                self._kept[record.name](record.body)
            if is_apart:
                await self._answers.settle()
        self._found.clear()

    def application(self) -> web.Application:
        """All that is served."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for name, serve in self._plain.items():
            app.router.add_post(f"{_API}/{name}", self._answering(partial(_of_body, serve)))
        for name in self._kept:
            app.router.add_post(f"{_API}/{name}", self._answering(partial(self._keep, name)))
        app.router.add_post(f"{_API}/retrieve_future", self._answering(self._retrieve))
        for path, look in {
            "healthz": _health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }.items():
            app.router.add_get(f"{_API}/{path}", self._answering(look))
        app.router.add_route("*", "/{path:.*}", self._answering(_refuse))
        return app

    async def close(self) -> None:
        await self._answers.close()

    def _answering(
        self, serve: Callable[[web.Request], Awaitable[ApiAnswer]]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def handle(request: web.Request) -> web.Response:
            try:
                given = request.headers.get("X-API-Key", "").encode()
                if not hmac.compare_digest(given, self._key):
                    raise RequestRefused("X-API-Key: this is not the key of this server", 401)
                answer = await serve(request)
            except RequestRefused as refused:
                told = {"error": str(refused), "message": str(refused)}
                return web.json_response(told, status=refused.status)
            return web.Response(body=answer.body, content_type=answer.content_type)

        return handle

    async def _keep(self, name: str, request: web.Request) -> ApiAnswer:
        """A request that a later server has to know, too."""
        body = await request.read()
        answer = self._kept[name](body)  # raises, if it is no request
        self._journal.write(KeptRequest(name, body))
        return answer

    async def _retrieve(self, request: web.Request) -> ApiAnswer:
        asked = read_json(await request.read(), types.FutureRetrieveRequest)
        answer = await self._answers.wait_for(asked.request_id, POLL_S)
        if answer is None:
            return json_of(TryAgainResponse(request_id=asked.request_id, queue_state="active"))
        return answer

    def _begun(
        self, request_id: str, work: Work, model_id: str | None = None, ids: list[str] | None = None
    ) -> ApiAnswer:
        self._answers.begin(request_id, work)
        return json_of(
            types.UntypedAPIFuture(
                request_id=request_id, model_id=model_id, sample_sequence_ids=ids
            )
        )

    def _config(self, _: bytes) -> ApiAnswer:
        return json_of(
            types.ClientConfigResponse(
                fwdbwd_max_chunk_len=_MAX_ROWS_A_PASS, use_pyqwest_transport=False
            )
        )

    async def _capabilities(self, _: web.Request) -> ApiAnswer:
        served = types.SupportedModel(
            model_name=Path(self._model.name).name,
            max_context_length=self._model.limits.max_tokens,
            trainable=True,
            sampleable=True,
        )
        return json_of(types.GetServerCapabilitiesResponse(supported_models=[served]))

    def _create_session(self, body: bytes) -> ApiAnswer:
        read_json(body, types.CreateSessionRequest)
        token = secrets.token_hex(8)
        return json_of(types.CreateSessionResponse(session_id=f"{token}-{self._seal(token)}"))

    def _seal(self, token: str) -> str:
        """So a later server knows that a session is one of its own."""
        return hmac.new(self._key, token.encode(), hashlib.sha256).hexdigest()[:16]

    def _heartbeat(self, body: bytes) -> ApiAnswer:
        self._hear(read_json(body, types.SessionHeartbeatRequest).session_id)
        return json_of(types.SessionHeartbeatResponse())

    def _hear(self, session: str) -> None:
        """Raises: RequestRefused: there is no such session."""
        token, _, seal = session.partition("-")
        if not hmac.compare_digest(seal.encode(), self._seal(token).encode()):
            raise RequestRefused(f"session_id: there is no session {session!r:.200}", 404)
        self._heard_s[session] = time.monotonic()

    def _is_silent(self, model_id: str) -> bool:
        session = model_id.partition(":")[0]
        return time.monotonic() > self._heard_s.setdefault(session, time.monotonic()) + SILENT_S

    def _create_model(self, body: bytes) -> ApiAnswer:
        asked = read_json(body, types.CreateModelRequest)
        self._hear(asked.session_id)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"

        async def create(known: ApiAnswer | None) -> ApiAnswer:
            self._model.check_wanted(asked)
            if known is None:
                await self._model.wait_until_free(
                    lambda other: other.startswith(f"{asked.session_id}:") or self._is_silent(other)
                )
                self._journal.begin_anew(KeptRequest("create_model", body))
            return await self._model.create(model_id, known)

        return self._begun(f"{model_id}:0", create, model_id)

    def _unload(self, body: bytes) -> ApiAnswer:
        asked = read_json(body, types.UnloadModelRequest)
        self._model.check_id(asked.model_id)
        return self._begun(f"{asked.model_id}:unload", self._model.unload, asked.model_id)

    def _info(self, body: bytes) -> ApiAnswer:
        asked = read_json(body, types.GetInfoRequest)
        self._model.check_id(asked.model_id)
        rank, name = self._model.lora_rank, Path(self._model.name).name
        return json_of(
            types.GetInfoResponse(
                model_id=asked.model_id,
                model_data=types.ModelData(model_name=name, tokenizer_id=self._model.name),
                model_name=name,
                is_lora=rank > 0,
                lora_rank=rank or None,
            )
        )

    def _pass(self, body: bytes) -> ApiAnswer:
        asked = read_pass(body)
        return self._in_order(asked, partial(self._model.run_pass, asked))

    def _train(
        self,
        kind: type[B],
        work: Callable[[Any, ApiAnswer | None], Awaitable[ApiAnswer]],
        body: bytes,
    ) -> ApiAnswer:
        try:
            asked = read_json(body, kind)
        except RequestRefused as refused:  # the requests behind it wait for its number
            numbered = read_json(body, Numbered)
            refuse = partial(self._model.refuse, numbered.seq_id, str(refused))
            return self._in_order(numbered, refuse)
        return self._in_order(asked, partial(work, asked))

    def _in_order(self, asked: Any, work: Work) -> ApiAnswer:
        self._model.check_id(asked.model_id)
        if not asked.seq_id:
            raise RequestRefused("seq_id: expected a number above 0")
        return self._begun(f"{asked.model_id}:{asked.seq_id}", work, asked.model_id)

    def _create_sampler(self, body: bytes) -> ApiAnswer:
        asked = read_json(body, types.CreateSamplingSessionRequest)
        self._hear(asked.session_id)
        session = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._model.open_sampler(session, asked)
        return json_of(types.CreateSamplingSessionResponse(sampling_session_id=session))

    async def _sampler(self, request: web.Request) -> ApiAnswer:
        session = request.match_info["sampler"]
        self._model.check_sampler(session)
        base = Path(self._model.name).name
        return json_of(types.GetSamplerResponse(sampler_id=session, base_model=base))

    def _sample(self, body: bytes) -> ApiAnswer:
        asked = read_json(body, types.SampleRequest)
        self._model.check_sampler(asked.sampling_session_id or "")
        request_id = f"{asked.sampling_session_id}:{asked.seq_id}"
        ids = [f"{request_id}:{number}" for number in range(min(asked.num_samples, 1024))]
        return self._begun(request_id, partial(self._model.sample, asked), ids=ids)


async def _of_body(serve: Callable[[bytes], ApiAnswer], request: web.Request) -> ApiAnswer:
    return serve(await request.read())


async def _health(_: web.Request) -> ApiAnswer:
    return json_of(types.HealthResponse(status="ok"))


async def _refuse(request: web.Request) -> ApiAnswer:
    raise RequestRefused(f"{request.method} {request.path:.200} is not served", 404)
