"""The HTTP client against a server that misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from asked_servers import Handler, serving

from areal_sc.engines.servers import client as http_client
from areal_sc.engines.servers.process import free_port
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.errors import (
    ConfigError,
    EngineFailed,
    PeerLost,
    ProtocolError,
    RpcTimeout,
    ServerBusy,
)


def sglang_of(handler: Handler) -> AbstractAsyncContextManager[SGLangClient]:
    return serving(SGLangClient, handler, control_timeout_s=5.0)


def answering(status: int, content: Any) -> Handler:
    async def answer(request: web.Request) -> web.StreamResponse:
        if isinstance(content, bytes):
            return web.Response(status=status, body=content)
        return web.json_response(content, status=status)

    return answer


@pytest.mark.parametrize(
    ("status", "content", "error", "message"),
    [
        (401, {"error": "Unauthorized"}, ConfigError, "refused the API key"),
        (403, {}, ConfigError, "name it in servers.api_key_env"),
        (429, {}, ServerBusy, "no request now"),
        (503, b"", ServerBusy, "HTTP 503"),
        (400, {"error": {"message": "too long"}}, EngineFailed, "too long"),
        (400, {"object": "error", "message": "no field"}, EngineFailed, "no field"),
        (400, {"success": False, "message": "no folder"}, EngineFailed, "no folder"),
        (500, b"Internal Server Error", EngineFailed, "Internal Server Error"),
        (200, b"<html>", ProtocolError, "did not answer with JSON"),
        (200, [1], ProtocolError, "answered with a list"),
    ],
)
async def test_answers_that_are_none(
    status: int, content: Any, error: type[Exception], message: str
) -> None:
    async with sglang_of(answering(status, content)) as client:
        with pytest.raises(error, match=message):
            await client.probe(timeout_s=60.0)


async def test_an_update_has_to_say_that_it_succeeded() -> None:
    for content in ({"success": False, "message": "shape"}, {}, {"success": "yes"}):
        async with sglang_of(answering(200, content)) as client:
            with pytest.raises(EngineFailed, match="did not succeed"):
                await client.begin_update()
    async with sglang_of(answering(200, {"success": True})) as client:
        await client.begin_update()


async def test_no_server() -> None:
    client = SGLangClient(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(PeerLost, match="no answer from"):
        await client.probe(timeout_s=60.0)
    await client.close()


async def test_a_connection_that_ends() -> None:
    async def hang_up(request: web.Request) -> web.StreamResponse:
        assert request.transport
        request.transport.abort()
        return web.Response()

    async def hang_up_midway(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 100
        await response.prepare(request)
        await response.write(b"{")
        assert request.transport
        request.transport.abort()
        return response

    for handler in (hang_up, hang_up_midway):
        async with sglang_of(handler) as client:
            with pytest.raises(PeerLost):
                await client.probe(timeout_s=60.0)


async def test_an_idle_connection_that_the_server_has_closed_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing was sent on it, so that the request may be sent again, whatever it asks for."""
    async with sglang_of(answering(200, {"success": True})) as client:
        whole, num_asked = client._session.request, 0

        async def ask(*arguments: Any, **named: Any) -> Any:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 1:
                closed = aiohttp.ClientConnectionResetError("Cannot write to closing transport")
                raise aiohttp.ClientOSError(None, "Can not write request body") from closed
            if num_asked == 3:
                raise aiohttp.ClientOSError(None, "no route")
            return await whole(*arguments, **named)

        monkeypatch.setattr(client._session, "request", ask)
        await client.request("POST", client.answers_at, {}, 60.0)
        assert num_asked == 2
        with pytest.raises(PeerLost, match="no route"):
            await client.request("POST", client.answers_at, {}, 60.0)


async def test_a_client_that_was_closed() -> None:
    async with sglang_of(answering(200, {})) as client:
        await client.close()
        with pytest.raises(PeerLost, match="was given up"):
            await client.probe(timeout_s=60.0)


async def test_closing_ends_requests_that_wait() -> None:
    asked, over = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        asked.set()
        await over.wait()
        return web.Response()

    async with sglang_of(wait) as client:
        waiting = asyncio.create_task(client.probe(timeout_s=60.0))
        await asked.wait()
        await client.close()
        with pytest.raises(PeerLost):
            await asyncio.wait_for(waiting, 60.0)
        over.set()


async def test_nobody_there_to_connect_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "_CONNECT_TIMEOUT_S", 0.05)
    with socket.socket() as full:  # a queue that is full drops further connections silently
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(address)
            client = SGLangClient(f"http://127.0.0.1:{address[1]}")
            with pytest.raises(PeerLost, match=r"not connected within 0\.05 s"):
                await client.probe(timeout_s=60.0)
            await client.close()


async def test_no_answer_in_time() -> None:
    over = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await over.wait()
        return web.Response()

    async with sglang_of(wait) as client:
        with pytest.raises(RpcTimeout, match=r"did not answer within 0\.05 s"):
            await client.probe(timeout_s=0.05)
        over.set()


async def test_an_answer_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "MAX_ANSWER_BYTES", 1000)
    async with sglang_of(answering(200, b"x" * 2000)) as client:
        with pytest.raises(ProtocolError, match="over 1000 bytes"):
            await client.probe(timeout_s=60.0)


async def test_what_is_sent() -> None:
    seen: list[tuple[str, str, Any, str | None]] = []

    async def note(request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        seen.append((request.method, request.path, body, request.headers.get("Authorization")))
        return web.json_response({"success": True})

    async with sglang_of(note) as client:
        await client.set_version(7)
        await client.pause(holds_requests=True)
        await client.abort("r1")
        await client.load_from_disk("/weights")
    version = {"new_version": "7", "abort_all_requests": False}
    assert seen[0] == ("POST", "/update_weight_version", version, "Bearer secret")
    assert seen[1][1:3] == ("/pause_generation", {"mode": "retract"})
    assert seen[2][1:3] == ("/abort_request", {"rid": "r1"})
    assert seen[3][2]["model_path"] == "/weights"


async def test_a_server_that_is_too_old() -> None:
    async with sglang_of(answering(200, {"version": "0.5.10"})) as client:
        with pytest.raises(ConfigError, match=r"SGLang 0\.5\.10: 0\.5\.11 or newer is needed"):
            await client.ask_abilities()
    async with sglang_of(answering(200, {"hello": "world"})) as client:
        with pytest.raises(ConfigError, match="of an unknown version"):
            await client.ask_abilities()


OLD_SERVER: dict[str, Any] = {
    "/server_info": {"version": "0.5.12", "max_req_input_len": 50, "tp_size": 2},
    "/model_info": {"model_path": "/m"},
    "/generate": {"meta_info": {"weight_version": "default"}},
}


async def test_a_server_that_can_less() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if request.path not in OLD_SERVER:
            return web.json_response({"detail": "Not Found"}, status=404)
        return web.json_response(OLD_SERVER[request.path])

    async with sglang_of(answer) as client:
        abilities = await client.ask_abilities()
        await client.begin_update()  # it has no such route, and is not asked
    assert (abilities.has_version_spans, abilities.max_support) == (False, 0)
    assert not abilities.tells_routes
    assert (abilities.tp_size, abilities.max_context_tokens) == (2, 50)
    assert abilities.architectures == ()
