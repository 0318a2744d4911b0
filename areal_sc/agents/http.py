"""What the servers of agents' calls have in common: keys, bodies, refusals. No torch."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from areal_sc.agents.calls import CallRefused, Dialect
from areal_sc.agents.dialects.chat_completions import ChatCompletions
from areal_sc.agents.dialects.messages import AnthropicMessages
from areal_sc.agents.dialects.responses import Responses

DIALECTS: Final[tuple[Dialect, ...]] = (ChatCompletions(), Responses(), AnthropicMessages())
MAX_BODY_BYTES: Final = 8 << 20
MAX_NESTING: Final = 200
"""Lists and objects of a body within each other; templates and encoders end at about 500."""
BACKLOG: Final = 1024
"""Connections that may come in one instant; a thousand agents may begin together."""
RETRY_COUNT: Final = "x-stainless-retry-count"
"""What the clients of OpenAI and Anthropic say: 0, or which try it is."""
DELIVERY: Final = "x-areal-delivery"
"""Names an answer that is passed on, so that it can be said at `UNDELIVERED` that this failed."""
UNDELIVERED: Final = "/undelivered"
COME_BACK_S: Final = 240.0
"""A request waits so long for a worker that is being started again, and so long for its session to
be restored. Both together are less than the 600 s after which OpenAI's clients ask again."""
_BODY_TIMEOUT_S: Final = 60.0
_SHUTDOWN_S: Final = 1.0


def _is_ours(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, (web.RequestPayloadError, HttpProcessingError))


_SERVER_LOG: Final = logging.getLogger(f"{__name__}.server")
"""Where aiohttp tells of what failed; a broken request is the client's fault, which has its 400."""
_SERVER_LOG.addFilter(_is_ours)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def key_in(request: web.Request) -> str:
    """The key that a request shows, as a client of OpenAI or of Anthropic does; "": none."""
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = request.headers.get("x-api-key", "")
    return key.strip()


def attempt_in(request: web.Request) -> int:
    """How often the client has tried the call before, as it says; 0: never, or it does not say."""
    told = request.headers.get(RETRY_COUNT, "")
    return int(told) if re.fullmatch("[0-9]{1,9}", told) else 0


async def read_body(request: web.Request) -> bytes:
    """Raises: CallRefused: 413, 408 or 400: the body is too large, does not come, or is broken."""
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            return await request.read()
    except web.HTTPRequestEntityTooLarge as error:
        raise CallRefused(
            413, "body_too_large", f"the body has more than {MAX_BODY_BYTES} bytes"
        ) from error
    except web.RequestPayloadError as error:
        told = request.headers.get("Content-Encoding", "none")
        raise CallRefused(
            400, "invalid_encoding", f"the body is not of its Content-Encoding, {told:.80}"
        ) from error
    except TimeoutError as error:
        raise CallRefused(
            408, "body_too_slow", f"the body did not come in {_BODY_TIMEOUT_S:g} s"
        ) from error


def decoded(body: bytes) -> dict[str, Any]:
    """Raises: CallRefused: 400: it is no JSON object, or nested too deeply."""
    try:
        found = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise CallRefused(400, "invalid_json", f"the body is no JSON object: {error}") from error
    level: list[Any] = [found]
    for _ in range(MAX_NESTING):
        inner = [it.values() if isinstance(it, dict) else it for it in level]
        level = [it for values in inner for it in values if isinstance(it, (dict, list))]
        if not level:
            return found
    raise CallRefused(
        400, "invalid_json", f"the body is nested more than {MAX_NESTING} levels deep"
    )


def answer_of(body: Any) -> web.Response:
    """A JSON body that is no refusal."""
    return web.Response(body=msgspec.json.encode(body), content_type="application/json")


def refusal_of(dialect: Dialect, refused: CallRefused) -> web.Response:
    """A refusal as the dialect says it, with what clients need to know of a retry."""
    comes_again = refused.retry_after_s is not None
    headers = {"x-should-retry": "true" if comes_again else "false"}
    if refused.retry_after_s is not None:
        headers["Retry-After"] = f"{math.ceil(refused.retry_after_s)}"
    return web.Response(
        status=refused.status,
        body=msgspec.json.encode(dialect.refuse(refused)),
        content_type="application/json",
        headers=headers,
    )


def refusing(serve: Handler, dialect: Dialect = DIALECTS[0]) -> Handler:
    """A handler that may raise CallRefused."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await serve(request)
        except CallRefused as refused:
            return refusal_of(dialect, refused)

    return handle


async def runner_of(app: web.Application) -> web.AppRunner:
    """Serves an application, once it has a site; a client that goes away ends its handler."""
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=_SERVER_LOG,
        handler_cancellation=True,
        shutdown_timeout=_SHUTDOWN_S,
    )
    await runner.setup()
    return runner


def wait_for_last_byte(request: web.Request) -> None:
    """What drains waits until the system has taken all."""
    if request.transport is not None:
        request.transport.set_write_buffer_limits(high=0)


async def though_client_goes(
    sending: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]
) -> None:
    """A client that has all of it may go at once, which cancels this, but not the sending.

    Args: tasks: keeps it until it is done.
    """
    task = asyncio.create_task(sending)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    await asyncio.shield(task)


def refuse_path(paths: str) -> Handler:
    """The handler of all other paths than these."""

    async def refuse(request: web.Request) -> web.StreamResponse:
        why = f"there is no {request.method} {request.path:.80} here: expected {paths}"
        return refusal_of(DIALECTS[0], CallRefused(404, "unknown_path", why))

    return refuse


def no_session() -> CallRefused:
    """What a request without a key of a session is told."""
    return CallRefused(
        401, "invalid_api_key", "the key is of no session: expected that of this episode"
    )
