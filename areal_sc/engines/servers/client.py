"""One running server, over HTTP with pooled connections and typed errors.

Every answer is checked: what comes back is what was asked for, or one of

    PeerLost       no connection, or it ended before the answer: nothing is known of the request
    RpcTimeout     no answer in time
    ServerBusy     the server takes no request now (it starts, ends, or its queue is full)
    EngineFailed   the server refused; the message is its own
    ConfigError    the API key is wrong
    ProtocolError  the answer is none that such a server gives
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import aiohttp

from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.errors import (
    ArealError,
    ConfigError,
    EngineFailed,
    ModelError,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ServerBusy,
)
from areal_sc.sizing.model_folder import read_whole_config

if TYPE_CHECKING:
    import torch

    from areal_sc.weights.published import BucketLayout, WeightGroup


PartReader = Callable[[dict[str, Any], int], AnswerPart | None]
"""What a part of a stream has told, and how many tokens were known before -> the next part of the
answer, if it is there."""

MAX_ANSWER_BYTES = 256 << 20
_CONNECT_TIMEOUT_S = 10.0
_KEEP_ALIVE_S = 3.0  # shorter than the 5 s after which servers close an idle connection
_MAX_REASON_CHARACTERS = 1000
_END_OF_EVENT = b"\n\n"
_LAST_EVENT = b"[DONE]"

_UNAUTHORIZED = (401, 403)
_BUSY = (429, 503)


@dataclass(frozen=True)
class ServerAbilities:
    """What one server is and can.

    Attributes:
        version: of its program.
        model_type: and `architectures`, as in the model's config.json; empty when not told.
        max_context_tokens: longest prompt and completion that it takes.
        tp_size: ranks that hold the weights.
        has_version_spans: it tells the version of every token, so that weights may be replaced
            under running requests.
        max_support: tokens that a truncated distribution may have; 0: it gives no log-probabilities
            under truncated distributions.
        tells_routes: it tells which experts tokens went through.
    """

    version: str
    model_type: str
    architectures: tuple[str, ...]
    max_context_tokens: int
    tp_size: int
    has_version_spans: bool
    max_support: int
    tells_routes: bool = False

    def check(self, url: str, model_folder: str, max_context_tokens: int) -> None:
        """Compares the server with the model that is trained.

        Raises: ModelError: it serves another model. ConfigError: its context is too short.
        """
        expected = read_whole_config(Path(model_folder)) or {}
        for name, found in (
            ("model_type", self.model_type),
            ("architectures", list(self.architectures)),
        ):
            wanted = expected.get(name)
            if found and wanted and found != wanted:
                raise ModelError(
                    f"the server at {url} serves another model than {model_folder}: {name} is "
                    f"{found!r}, expected {wanted!r}; start it with that folder"
                )
        if self.max_context_tokens < max_context_tokens:
            raise ConfigError(
                f"the server at {url} takes {self.max_context_tokens} tokens, but "
                f"rollout.max_context_tokens is {max_context_tokens}: lower it, or start the "
                "server with a longer context, and room for it in its KV cache"
            )


class ServedAdapter(NamedTuple):
    """What requests are answered with, of a server that gets adapters.

    Attributes:
        name: that the server knows it by; "": the model alone.
        version: policy version.
    """

    name: str
    version: int

    def note_in(self, part: AnswerPart, num_known: int = 0) -> AnswerPart:
        """The answer of a request that named this adapter; the server tells other versions.

        Args:
            num_known: tokens of the parts of a stream before this one.
        """
        return replace(part, versions=[self.version] * (num_known + len(part.token_ids)))


class ServerClient:
    """One life of a server. Must be made on a running event loop, and closed on it.

    A kind of server implements the calls that end in `NotImplementedError`.

    Args:
        url: `http://host:port`.
        api_key: sent with every request; empty sends none.
        control_timeout_s: for answers that do not wait for tokens or weights.
        step_timeout_s: for each step of a weight update.

    Attributes:
        section: name of the kind's settings, for messages.
        answers_at: path that answers are asked for at.
        adapter_field: of what is posted there, that names an adapter.
        stream_fields: with which an answer comes in parts.
        abilities: what `ask_abilities` found.
        groups: names of the weight groups that it is in.
        adapter: what requests name; None: the server gets whole weights.
        bare_logprobs: [P - 1] of the probe of adapters (`prompt_logprobs`) by the model alone.
    """

    section: ClassVar[str]
    answers_at: ClassVar[str]
    adapter_field: ClassVar[str]
    stream_fields: ClassVar[Mapping[str, Any]]
    abilities: ServerAbilities
    adapter: ServedAdapter | None = None
    bare_logprobs: list[float] | None = None

    def __init__(
        self,
        url: str,
        api_key: str = "",
        control_timeout_s: float = 60.0,
        step_timeout_s: float = 600.0,
    ) -> None:
        self.url = url.rstrip("/")
        self.groups: set[str] = set()
        self._control_timeout_s = control_timeout_s
        self._step_timeout_s = step_timeout_s
        self._answers: set[aiohttp.ClientResponse] = set()
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else None
        # Answers are many, and share connections. Each of the others has one of its own: it cannot
        # be asked twice, and a server closes idle ones, maybe just when this process is held up.
        self._session, self._others = (
            aiohttp.ClientSession(headers=headers, connector=connector, trust_env=False)
            for connector in (
                aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                aiohttp.TCPConnector(limit=0, force_close=True),
            )
        )

    async def check_health(self, *, timeout_s: float) -> None:
        """Returns when the server has generated a token."""
        await self.request("GET", "/health", None, timeout_s)

    async def probe(self, *, timeout_s: float) -> None:
        """Returns when the process that computes has answered, which it does while paused too."""
        raise NotImplementedError

    async def ask_abilities(self) -> ServerAbilities:
        """Asks a server that is not paused what it can do. Raises: ConfigError: it is too old to be
        driven."""
        raise NotImplementedError

    async def served_weights(self) -> tuple[int | None, str]:
        """Policy version, None when it is no run's, and the folder that the server was given."""
        raise NotImplementedError

    async def answer(self, request: CompletionRequest, max_support: int | None) -> AnswerPart:
        """Goes on with the request; waits as long as it takes.

        Args:
            max_support: None samples from the whole distribution; else the largest number of
                tokens that a truncated one may have, and log-probabilities are those under it.
        """
        body, adapter = self._body_of(request, max_support), self.adapter
        answer = await self.request("POST", self.answers_at, body, None)
        part = self._read_answer(answer, request)
        request.check_read(answer, part)
        return part if adapter is None else adapter.note_in(part)

    async def stream_answer(
        self, request: CompletionRequest, max_support: int | None
    ) -> AsyncGenerator[AnswerPart]:
        """Like `answer`, but gives it in parts while it is sampled.

        Only the last part has a reason to end. It also has the versions of all tokens of the
        answer, which the others do not know.
        """
        body, adapter = self._body_of(request, max_support), self.adapter
        read, num_known = self._part_reader(request), 0
        async with aclosing(
            self.events(self.answers_at, {**body, **self.stream_fields})
        ) as answers:
            async for answer in answers:
                if (part := read(answer, num_known)) is None:
                    continue
                if not num_known:
                    request.check_read(answer, part)
                if part.finish and adapter is not None:
                    part = adapter.note_in(part, num_known)
                num_known += len(part.token_ids)
                yield part

    def _body_of(self, request: CompletionRequest, max_support: int | None) -> dict[str, Any]:
        body = self._make_body(request, max_support)
        if request.adapter:
            body[self.adapter_field] = request.adapter
        elif self.adapter is not None:
            body[self.adapter_field] = self.adapter.name or None
        return body

    def _make_body(self, request: CompletionRequest, max_support: int | None) -> dict[str, Any]:
        """What is posted to ask for an answer of the model alone."""
        raise NotImplementedError

    def _read_answer(self, answer: dict[str, Any], request: CompletionRequest) -> AnswerPart:
        """Raises: ProtocolError: no server gives such an answer."""
        raise NotImplementedError

    def _part_reader(self, request: CompletionRequest) -> PartReader:
        """Reads the parts of one stream."""
        raise NotImplementedError

    async def abort(self, request_id: str) -> None:
        """Ends a request, which is answered with what it has; no error when there is none."""
        raise NotImplementedError

    async def abort_all(self) -> None:
        """Ends the requests that run, as `abort` does; one that arrives meanwhile may go on."""
        raise NotImplementedError

    async def pause(self, *, holds_requests: bool) -> None:
        """Returns when no further step begins; running requests are held, or answered at once."""
        raise NotImplementedError

    async def resume(self) -> None:
        raise NotImplementedError

    async def sleep(self) -> None:
        """Gives up the memory of weights and KV cache; it is paused, and has no request."""
        raise NotImplementedError

    async def take_weights_memory(self) -> None:
        """After `sleep`: it can load weights; what it had is lost."""
        raise NotImplementedError

    async def take_cache_memory(self) -> None:
        """After that: it can generate, once it is resumed."""
        raise NotImplementedError

    async def set_version(self, version: int) -> None:
        """Names the weights that the server has; requests go on."""
        raise NotImplementedError

    async def load_from_disk(self, folder: str) -> None:
        """Replaces the weights by those of a folder on the server's disk, and drops the cache."""
        raise NotImplementedError

    async def loaded_adapters(self) -> set[str]:
        """Names of the adapters that requests may name, and of the model."""
        models = await self._get("/v1/models")
        try:
            return {str(model["id"]) for model in models["data"]}
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"{self.url} does not tell its adapters: {error!r}") from error

    async def load_adapter(self, name: str, folder: str) -> None:
        """Loads an adapter of peft's format; requests go on. Raises: EngineFailed: refused."""
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        """Forgets an adapter that no request names any more."""
        raise NotImplementedError

    async def prompt_logprobs(self, token_ids: list[int], adapter: str) -> list[float]:
        """[P - 1] nats, of each token of a row [P] but the first; NaN where one is not finite.

        Args:
            adapter: name of the one to compute with; "": none.
        """
        raise NotImplementedError

    async def begin_update(self) -> None:
        """Before weights come in buckets."""
        raise NotImplementedError

    async def end_update(self) -> None:
        """After the last bucket."""
        raise NotImplementedError

    async def load_tensors(
        self, flat: torch.Tensor, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        """Loads one bucket of weights, on a server that this process has started.

        Args:
            flat: [n] uint8, in shared memory that has a name; not written before all have loaded.
            layout: of its bytes.
            drops_cache: as the last bucket has to.
        """
        raise NotImplementedError

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Becomes ranks of a process group; returns when all of the group's ranks are there."""
        raise NotImplementedError

    async def leave_group(self, name: str) -> None:
        raise NotImplementedError

    async def receive_broadcast(
        self, group_name: str, layout: BucketLayout, *, drops_cache: bool
    ) -> None:
        """Takes part in the broadcast of one bucket."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends its requests with PeerLost."""
        for answer in self._answers:  # the session would leave who reads one waiting
            answer.close()
        await self._session.close()
        await self._others.close()

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> dict[str, Any]:
        """The answer to a request that the server has accepted; {} when it has no content."""
        status, content = await self.send(method, path, body, timeout_s)
        if status != 200:
            raise self.refusal(path, status, content)
        return self._object(path, content)

    async def _get(self, path: str) -> dict[str, Any]:
        return await self.request("GET", path, None, self._control_timeout_s)

    async def _post(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return await self.request("POST", path, body, self._control_timeout_s)

    async def command(self, path: str, body: Mapping[str, Any]) -> None:
        """A step of an update that the server accepts in plain words, or in none."""
        status, content = await self.send("POST", path, body, self._step_timeout_s)
        if status != 200:
            raise self.refusal(path, status, content)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """The objects of a `text/event-stream`, as they come.

        Raises: EngineFailed: one tells of an error. PeerLost: the stream broke off.
        """
        async with self._open("POST", path, body, None) as response:
            unread = bytearray()
            async for chunk in response.content.iter_any():
                unread += chunk
                self._check_size(path, unread)
                if response.status != 200:
                    continue
                *events, unread = unread.split(_END_OF_EVENT)
                for event in events:
                    content = bytes(event.removeprefix(b"data:").strip())
                    if content == _LAST_EVENT:
                        return
                    answer = self._object(path, content)
                    if "error" in answer:
                        raise EngineFailed(f"{self.url}{path} failed: {reason_of(answer)}")
                    yield answer
            if response.status != 200:
                raise self.refusal(path, response.status, bytes(unread))
        raise PeerLost(f"{self.url}{path} broke off in the middle of its answer")

    def refusal(self, path: str, status: int, content: bytes) -> ArealError:
        """What an HTTP status other than 200 means."""
        if status in _BUSY:
            return ServerBusy(f"{self.url}{path} takes no request now (HTTP {status})")
        if status in _UNAUTHORIZED:
            return ConfigError(
                f"{self.url}{path} refused the API key (HTTP {status}): put the server's key "
                f"into an environment variable and name it in servers.api_key_env"
            )
        try:
            answer = json.loads(content) if content else {}
        except ValueError:
            answer = content[:_MAX_REASON_CHARACTERS].decode(errors="replace")
        return EngineFailed(f"{self.url}{path} refused (HTTP {status}): {reason_of(answer)}")

    def _check_size(self, path: str, content: bytearray) -> None:
        if len(content) > MAX_ANSWER_BYTES:
            raise ProtocolError(f"{self.url}{path} answered with over {MAX_ANSWER_BYTES} bytes")

    def _object(self, path: str, content: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(content) if content else {}
        except ValueError as error:
            raise ProtocolError(f"{self.url}{path} did not answer with JSON") from error
        if not isinstance(answer, dict):
            raise ProtocolError(
                f"{self.url}{path} answered with a {type(answer).__name__}, expected an object"
            )
        return answer

    async def send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        """HTTP status and content, whatever they are."""
        async with self._open(method, path, body, timeout_s) as response:
            content = bytearray()
            async for chunk in response.content.iter_any():
                content += chunk
                self._check_size(path, content)
            return response.status, bytes(content)

    @asynccontextmanager
    async def _open(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer whose content is yet to be read; errors of the network become ours."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_TIMEOUT_S)
        if self._session.closed:
            raise PeerLost(f"{self.url} was given up")
        try:
            async with await self._ask(method, path, body, timeout) as response:
                self._answers.add(response)
                try:
                    yield response
                finally:
                    self._answers.discard(response)
        except aiohttp.ConnectionTimeoutError as error:
            raise PeerLost(
                f"no answer from {self.url}{path}: not connected within {_CONNECT_TIMEOUT_S:g} s"
            ) from error
        except TimeoutError as error:
            raise RpcTimeout(f"{self.url}{path} did not answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise PeerLost(f"no answer from {self.url}{path}: {reason}") from error

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limits: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        session = self._session if path == self.answers_at else self._others
        ask = partial(session.request, method, self.url + path, json=body, timeout=limits)
        try:
            return await ask()
        except aiohttp.ClientOSError as error:
            if not isinstance(error.__cause__, aiohttp.ClientConnectionResetError):
                raise
            return await ask()  # the server had closed an idle connection: it has got nothing


def reason_of(answer: Any) -> str:
    """The message in an answer, in whichever of the usual forms."""
    if isinstance(answer, dict):
        error = answer.get("error")
        answer = answer.get("message") or (
            error.get("message") if isinstance(error, dict) else error
        )
    return str(answer)[:_MAX_REASON_CHARACTERS]
