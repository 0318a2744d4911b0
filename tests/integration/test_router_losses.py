"""The address of a run, whose clients go away, and whose workers fall silent."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from aiohttp import web
from integration.router_process import LIMIT_S, RouterProcess, router_process
from integration.test_router import ASKED, CHAT, KEYS, RUN, Run, running
from msgspec.structs import replace
from waiting import until

from areal_sc.agents import claims
from areal_sc.agents import router as router_module
from areal_sc.agents.keys import SessionName
from areal_sc.agents.router import Router
from areal_sc.agents.routes import AgentsAt, Routes
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.errors import AgentError

LOST = SessionName("rollout/7", "a1", 1)


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process() as process:
        yield process


@asynccontextmanager
async def offered(run: Run, *names: str, **limits: float) -> AsyncIterator[list[Any]]:
    """The sessions of these workers, once all can be claimed."""
    waits = [
        asyncio.create_task(
            run.servers[name].wait_outside(
                run.sessions[name].api_key, {"q": name}, AgentsConfig(**limits)
            )
        )
        for name in names
    ]
    await until(lambda: all(run.servers[it]._claims._offers for it in names))
    try:
        yield waits
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def claimed_at_worker(run: Run, name: str, key: str = "") -> dict[str, Any]:
    """A claim whose answer the process of the address never has."""
    headers = {**RUN, **({"Idempotency-Key": key} if key else {})}
    async with aiohttp.request("POST", f"{run.at[name].url}/episodes", headers=headers) as answer:
        assert answer.status == 200
        return json.loads(await answer.read())


async def test_a_claim_that_nobody_confirms_is_void(
    router: RouterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(router) as run, offered(run, "rollout/0"):
        with monkeypatch.context() as patch:
            patch.setattr(claims, "UNCONFIRMED_S", 0.1)
            before = await claimed_at_worker(run, "rollout/0")
        async with asyncio.timeout(LIMIT_S):
            while (got := await run.post("/episodes", {}, KEYS.run_key))[0] == 429:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        status, episode = got
        assert status == 200
        assert episode["row"] == before["row"]
        assert episode["id"] != before["id"]
        assert await run.post(CHAT, ASKED, before["api_key"]) == (409, "session_ended")
        for how in ("reward", "reject"):
            path = f"/episodes/{before['id']}/{how}"
            assert await run.post(path, {}, KEYS.run_key) == (409, "session_ended")
        run.engines["rollout/0"].will_say("hello<|im_end|>")
        assert (await run.post(CHAT, ASKED, episode["api_key"]))[0] == 200
        path = f"/episodes/{episode['id']}/reward"
        assert (await run.post(path, {"reward": 1}, KEYS.run_key))[0] == 200
        (row,) = run.sessions["rollout/0"].trajectories(1.0)
        assert row.metrics["agent/calls"] == 1.0


async def test_a_call_confirms_a_claim(
    router: RouterProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims, "UNCONFIRMED_S", 1e6)
    async with running(router) as run, offered(run, "rollout/0", idle_timeout_s=1.0) as waits:
        episode = await claimed_at_worker(run, "rollout/0")
        run.engines["rollout/0"].will_say("hello<|im_end|>")
        assert (await run.post(CHAT, ASKED, episode["api_key"]))[0] == 200
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(AgentError) as rejected:  # limits begin with the confirmation
                await waits[0]
        assert rejected.value.kind == "agent_idle"


async def test_a_repeated_claim_has_the_same_episode(router: RouterProcess) -> None:
    async with running(router) as run, offered(run, "rollout/0", "rollout/1"):

        async def claim(key: str) -> tuple[int, Any]:
            return await run.post("/episodes", {}, KEYS.run_key, **{"Idempotency-Key": key})

        first, again = await claim("a"), await claim("a")
        assert (first[0], again) == (200, first)
        unconfirmed = await claimed_at_worker(run, first[1]["row"]["q"], "a")
        assert unconfirmed["id"] == first[1]["id"]
        assert (await claim("b"))[1]["id"] != first[1]["id"]
        path = f"/episodes/{first[1]['id']}/reject"
        assert (await run.post(path, {}, KEYS.run_key))[0] == 200
        assert await claim("a") == (429, "no_episode")


@pytest.mark.parametrize("begins", [False, True])
async def test_a_call_in_flight_ends_when_its_machine_is_told_lost(
    router: RouterProcess, begins: bool
) -> None:
    asked, ends = asyncio.Event(), asyncio.Event()

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if begins:
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
        asked.set()
        await ends.wait()
        writer.close()

    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server, running(router) as run:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        router.tell({"rollout/7": AgentsAt("a1", url)})

        async def call() -> tuple[int, bytes]:
            headers = {"x-api-key": KEYS.key_of(LOST)}
            async with run.client.post(CHAT, json=ASKED, headers=headers) as answer:
                if answer.status == 200:
                    assert await answer.content.readexactly(2) == b"hi"
                    router.tell({})
                return answer.status, await answer.read()

        async with asyncio.timeout(LIMIT_S):
            calling = asyncio.create_task(call())
            await asked.wait()
            if begins:
                with pytest.raises(aiohttp.ClientPayloadError):
                    await calling
            else:
                router.tell({})
                assert (await calling)[0] == 410
        ends.set()


async def test_a_broken_request_leaves_no_key_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log"
    with path.open("wb") as log, router_process(stderr=log) as process:
        async with running(process) as run:
            key = run.sessions["rollout/0"].api_key
            ports = process.port, int(run.at["rollout/0"].url.rpartition(":")[2])
            for port in ports:
                for name, told in (("Authorization: Bearer ", KEYS.run_key), ("x-api-key: ", key)):
                    raw = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\n{name}{told}\x01\r\n\r\n"
                    reader, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.write(raw.encode())
                    async with asyncio.timeout(LIMIT_S):
                        assert b" 400 " in await reader.read()
                    writer.close()
    for text in (path.read_text(), caplog.text):
        assert KEYS.run_key not in text
        assert key not in text


class RouterHere(NamedTuple):
    """A router in this process, before the worker `rollout/7`."""

    url: str
    router: Router
    at: AgentsAt


@asynccontextmanager
async def router_here(
    worker: web.Application, listener: socket.socket
) -> AsyncIterator[RouterHere]:
    behind = web.AppRunner(worker)
    await behind.setup()
    await web.TCPSite(behind, "127.0.0.1", 0).start()
    at = AgentsAt("a1", f"http://127.0.0.1:{behind.addresses[0][1]}")
    async with aiohttp.ClientSession() as client:
        router = Router(KEYS, Routes({"rollout/7": at}), client)
        before = web.AppRunner(router.application())
        await before.setup()
        await web.SockSite(before, listener).start()
        yield RouterHere(f"http://127.0.0.1:{listener.getsockname()[1]}", router, at)
        await before.cleanup()
    await behind.cleanup()


async def test_a_worker_that_let_a_claim_wait_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_asked, ends = 0, asyncio.Event()

    async def silent(_: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        monkeypatch.setattr(router_module, "CLAIM_S", 1e6)  # of the pause, and of further claims
        await ends.wait()
        return web.Response()

    worker = web.Application()
    worker.router.add_post("/episodes", silent)
    monkeypatch.setattr(router_module, "CLAIM_S", 1.0)
    async with router_here(worker, socket.create_server(("127.0.0.1", 0))) as here:
        for _ in range(3):
            async with asyncio.timeout(LIMIT_S):
                async with aiohttp.request("POST", f"{here.url}/episodes", headers=RUN) as answer:
                    assert answer.status == 429
        assert num_asked == 1
        ends.set()


async def test_a_worker_that_is_being_started_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=b"it is back")

    worker = web.Application()
    worker.router.add_post(CHAT, answers)
    async with router_here(worker, socket.create_server(("127.0.0.1", 0))) as here:

        async def call() -> tuple[int, str | None, bytes]:
            key = {"x-api-key": KEYS.key_of(LOST)}
            async with aiohttp.request("POST", f"{here.url}{CHAT}", headers=key) as answer:
                return answer.status, answer.headers.get("Retry-After"), await answer.read()

        here.router.take_routes(Routes({}, ["rollout/7"]))
        monkeypatch.setattr(router_module, "COME_BACK_S", 0.05)
        async with asyncio.timeout(LIMIT_S):
            assert (await call())[:2] == (503, "1")
        monkeypatch.setattr(router_module, "COME_BACK_S", 1e6)
        calling = asyncio.create_task(call())
        await asyncio.sleep(0.1)
        here.router.take_routes(Routes({"rollout/7": here.at}))
        async with asyncio.timeout(LIMIT_S):
            assert await calling == (200, None, b"it is back")
        # one that is said to be up is not waited for that long: its client tries it again
        monkeypatch.setattr(router_module, "NEWS_S", 0.05)
        nowhere = replace(here.at, url="http://127.0.0.1:9")
        here.router.take_routes(Routes({"rollout/7": nowhere}))
        async with asyncio.timeout(LIMIT_S):
            assert (await call())[:2] == (503, "1")


async def test_an_answer_that_the_system_has_not_taken_is_undelivered() -> None:
    told = asyncio.Event()

    async def answers(_: web.Request) -> web.Response:
        return web.Response(body=b"x" * 40_000)

    async def undelivered(_: web.Request) -> web.Response:
        told.set()
        return web.Response()

    worker = web.Application()
    worker.router.add_post(CHAT, answers)
    worker.router.add_post("/undelivered", undelivered)
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    loop = asyncio.get_running_loop()
    async with router_here(worker, listener):
        with socket.socket() as client:
            client.setblocking(False)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            await loop.sock_connect(client, listener.getsockname())
            head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nx-api-key: {KEYS.key_of(LOST)}\r\n"
            await loop.sock_sendall(client, f"{head}Content-Length: 0\r\n\r\n".encode())
            async with asyncio.timeout(LIMIT_S):
                assert await loop.sock_recv(client, 100)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        async with asyncio.timeout(LIMIT_S):
            await told.wait()
