"""The Tinker API over HTTP: what its official client asks for, answered by a `ServedModel`.

    POST /api/v1/...   at once the id of a request; the work goes on
    retrieve_future    its answer, or after some seconds that it is still worked on

Requests name what they are by numbers of their client (`seq_id`), so one that is repeated is the
same one. A session whose client is silent gives its model up when another one wants to train.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from aiohttp import web
from tinker import types
from tinker.types.load_weights_request import LoadWeightsRequest
from tinker.types.save_weights_external_request import SaveWeightsExternalRequest
from tinker.types.try_again_response import TryAgainResponse

from areal_sc.serving.answers import Answers
from areal_sc.serving.served_model import ServedModel
from areal_sc.serving.wire import Answer, Refused, json_of, read_json, read_pass
from areal_sc.system.durable import replace_file

MAX_BODY_BYTES: Final = 64 << 20
KEY_PREFIX: Final = "tml-"
"""Which the official client expects of a key."""
POLL_S: Final = 20.0
SILENT_S: Final = 120.0
"""A client tells every few seconds that it lives."""
_API: Final = "/api/v1"
_MAX_ROWS_A_PASS: Final = 1024

Body = Callable[[web.Request], Awaitable[Answer]]


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
    """

    def __init__(self, model: ServedModel, key: str) -> None:
        self._model = model
        self._key = key
        self._answers = Answers()
        self._heard_s: dict[str, float] = {}  # of each session

    def application(self) -> web.Application:
        """All that is served."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        for name, serve in {
            "client/config": self._config,
            "client/dynamic_config": self._dynamic_config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "telemetry": self._telemetry,
            "create_model": self._create_model,
            "unload_model": self._unload,
            "get_info": self._info,
            "forward_backward": self._pass,
            "optim_step": self._step,
            "save_weights": self._save,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": partial(self._refuse, LoadWeightsRequest),
            "save_weights_external": partial(self._refuse, SaveWeightsExternalRequest),
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
        }.items():
            app.router.add_post(f"{_API}/{name}", partial(self._answered, serve))
        for name, serve in {
            "healthz": self._health,
            "get_server_capabilities": self._capabilities,
            "samplers/{sampler}": self._sampler,
        }.items():
            app.router.add_get(f"{_API}/{name}", partial(self._answered, serve))
        app.router.add_route("*", "/{path:.*}", partial(self._answered, _unknown))
        return app

    async def close(self) -> None:
        await self._answers.close()

    async def _answered(self, serve: Body, request: web.Request) -> web.Response:
        try:
            given = request.headers.get("X-API-Key", "")
            if not hmac.compare_digest(given.encode(), self._key.encode()):
                raise Refused("X-API-Key: this is not the key of this server", 401)
            answer = await serve(request)
        except Refused as refused:
            told = {"error": str(refused), "message": str(refused)}
            return web.json_response(told, status=refused.status)
        return web.Response(body=answer.body, content_type=answer.content_type)

    async def _config(self, _: web.Request) -> Answer:
        return json_of(
            types.ClientConfigResponse(
                fwdbwd_max_chunk_len=_MAX_ROWS_A_PASS, use_pyqwest_transport=False
            )
        )

    async def _dynamic_config(self, _: web.Request) -> Answer:
        return json_of(types.ClientDynamicConfigResponse())

    async def _health(self, _: web.Request) -> Answer:
        return json_of(types.HealthResponse(status="ok"))

    async def _telemetry(self, _: web.Request) -> Answer:
        """Nothing of it is kept."""
        return json_of(types.TelemetryResponse(status="accepted"))

    async def _capabilities(self, _: web.Request) -> Answer:
        served = types.SupportedModel(
            model_name=Path(self._model.name).name,
            max_context_length=self._model.limits.max_tokens,
            trainable=True,
            sampleable=True,
        )
        return json_of(types.GetServerCapabilitiesResponse(supported_models=[served]))

    async def _create_session(self, request: web.Request) -> Answer:
        read_json(await request.read(), types.CreateSessionRequest)
        session = secrets.token_hex(8)
        self._heard_s[session] = time.monotonic()
        return json_of(types.CreateSessionResponse(session_id=session))

    async def _heartbeat(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.SessionHeartbeatRequest)
        self._check_session(asked.session_id)
        return json_of(types.SessionHeartbeatResponse())

    def _check_session(self, session: str) -> None:
        if session not in self._heard_s:
            raise Refused(f"session_id: there is no session {session!r:.200}", 404)
        self._heard_s[session] = time.monotonic()

    async def _create_model(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.CreateModelRequest)
        self._check_session(asked.session_id)
        model_id = f"{asked.session_id}:train:{asked.model_seq_id}"
        owner = self._model.model_id.partition(":")[0]
        if time.monotonic() > self._heard_s.get(owner, 0.0) + SILENT_S:
            self._model.model_id = ""
        return self._begun(f"{model_id}:0", lambda: self._model.create(model_id, asked), model_id)

    async def _unload(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.UnloadModelRequest)
        self._model.check_id(asked.model_id)
        return self._begun(f"{asked.model_id}:unload", self._model.unload, asked.model_id)

    async def _info(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.GetInfoRequest)
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

    async def _pass(self, request: web.Request) -> Answer:
        asked = read_pass(await request.read())
        self._model.check_id(asked.model_id)
        request_id = f"{asked.model_id}:{asked.seq_id}"
        return self._begun(request_id, lambda: self._model.run_pass(asked), asked.model_id)

    async def _step(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.OptimStepRequest)
        self._model.check_id(asked.model_id)
        request_id = f"{asked.model_id}:{asked.seq_id}"
        return self._begun(request_id, lambda: self._model.take_step(asked), asked.model_id)

    async def _save(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.SaveWeightsRequest)
        self._model.check_id(asked.model_id)
        request_id = f"{asked.model_id}:{asked.seq_id}"
        return self._begun(request_id, lambda: self._model.save(asked), asked.model_id)

    async def _save_for_sampler(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.SaveWeightsForSamplerRequest)
        self._model.check_id(asked.model_id)
        owner = asked.model_id.partition(":")[0]
        session = f"{owner}:sample:{asked.sampling_session_seq_id}"
        request_id = f"{asked.model_id}:{asked.seq_id}"
        return self._begun(
            request_id, lambda: self._model.save_for_sampler(asked, session), asked.model_id
        )

    async def _create_sampler(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.CreateSamplingSessionRequest)
        self._check_session(asked.session_id)
        session = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        self._model.open_sampler(session, asked)
        return json_of(types.CreateSamplingSessionResponse(sampling_session_id=session))

    async def _sampler(self, request: web.Request) -> Answer:
        session = request.match_info["sampler"]
        self._check_sampler(session)
        base = Path(self._model.name).name
        return json_of(types.GetSamplerResponse(sampler_id=session, base_model=base))

    def _check_sampler(self, session: str | None) -> None:
        if session is None or not self._model.has_sampler(session):
            raise Refused(f"there is no sampling session {session!r:.200}", 404)

    async def _sample(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.SampleRequest)
        self._check_sampler(asked.sampling_session_id)
        request_id = f"{asked.sampling_session_id}:{asked.seq_id}"
        ids = [f"{request_id}:{number}" for number in range(asked.num_samples)]
        return self._begun(request_id, lambda: self._model.sample(asked), ids=ids)

    async def _refuse(
        self, kind: type[LoadWeightsRequest | SaveWeightsExternalRequest], request: web.Request
    ) -> Answer:
        read_json(await request.read(), kind)
        raise Refused(f"{request.path} is not served", 404)

    def _begun(
        self,
        request_id: str,
        work: Callable[[], Awaitable[Answer]],
        model_id: str | None = None,
        ids: list[str] | None = None,
    ) -> Answer:
        if request_id not in self._answers:
            self._answers.begin(request_id, work())
        return json_of(
            types.UntypedAPIFuture(
                request_id=request_id, model_id=model_id, sample_sequence_ids=ids
            )
        )

    async def _retrieve(self, request: web.Request) -> Answer:
        asked = read_json(await request.read(), types.FutureRetrieveRequest)
        answer = await self._answers.wait_for(asked.request_id, POLL_S)
        if answer is None:
            return json_of(TryAgainResponse(request_id=asked.request_id, queue_state="active"))
        return answer


async def _unknown(request: web.Request) -> Answer:
    raise Refused(f"{request.method} {request.path:.200} is not served", 404)
