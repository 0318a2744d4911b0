"""The process of a run's address: what it passes on, and the callers that it refuses."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import chat_templates as templates
import pytest
from integration.router_process import LIMIT_S, SECRET, RouterProcess, router_process
from scripted_engine import ScriptedEngine, engine_for

from areal_sc.agents.http import MAX_BODY_BYTES
from areal_sc.agents.keys import SessionKeys, SessionName
from areal_sc.agents.routes import AgentsAt
from areal_sc.agents.server import AgentServer
from areal_sc.agents.session import Session, SessionSettings
from areal_sc.config.agent_settings import AgentsConfig
from areal_sc.config.schema import GenerationConfig
from areal_sc.errors import AgentError
from areal_sc.transport.sockets.interface import LOOPBACK, Interface

KEYS = SessionKeys(SECRET)
RUN = {"Authorization": f"Bearer {KEYS.run_key}"}
SAMPLING = GenerationConfig(max_new_tokens=64)
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def router() -> Iterator[RouterProcess]:
    with router_process() as process:
        yield process


class Run:
    """Two workers with an open session each, and the address before them.

    Attributes:
        sessions: by worker.
    """

    def __init__(self, router: RouterProcess) -> None:
        self.router = router
        self.engines: dict[str, ScriptedEngine] = {}
        self.servers: dict[str, AgentServer] = {}
        self.sessions: dict[str, Session] = {}
        self.at: dict[str, AgentsAt] = {}
        self.client: aiohttp.ClientSession

    async def post(
        self, path: str, body: Any = None, key: str = "", **headers: str
    ) -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        headers |= {"Authorization": f"Bearer {key}"} if key else {}
        async with self.client.post(path, data=io.BytesIO(data), headers=headers) as answer:
            told = await answer.json()
            return answer.status, told if answer.status == 200 else told["error"]["code"]

    async def sent(self, raw: bytes) -> bytes:
        """What comes back on a connection of its own."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.router.port)
        writer.write(raw)
        await writer.drain()
        async with asyncio.timeout(LIMIT_S):
            told = await reader.read()
        writer.close()
        return told


@asynccontextmanager
async def running(router: RouterProcess, interface: Interface = LOOPBACK) -> AsyncIterator[Run]:
    run = Run(router)
    async with AsyncExitStack() as stack:
        for name in ("rollout/0", "rollout/1"):
            engine = run.engines[name] = engine_for(templates.QWEN)
            server = run.servers[name] = AgentServer(name, "a1", SECRET)
            stack.push_async_callback(server.close)
            opened = server.open(engine, SAMPLING, SessionSettings())
            run.sessions[name] = await stack.enter_async_context(opened)
            run.at[name] = await server.reachable(interface)
        router.tell(run.at)
        run.client = await stack.enter_async_context(aiohttp.ClientSession(router.url))
        yield run


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_a_key_leads_to_its_worker_in_the_clear_on_loopback_alone(
    router: RouterProcess, host: str
) -> None:
    async with running(router, Interface(host, "127.0.0.1")) as run:
        scheme = "http://" if host == "127.0.0.1" else "https://"
        assert all(at.url.startswith(scheme) for at in run.at.values())
        for number, (name, session) in enumerate(run.sessions.items()):
            run.engines[name].will_say(f"{number}<|im_end|>", f"{number}<|im_end|>")
            status, told = await run.post(CHAT, ASKED, session.api_key)
            assert (status, told["choices"][0]["message"]["content"]) == (200, str(number))
            key = {"x-api-key": session.api_key}
            status, told = await run.post("/v1/messages", {**ASKED, "max_tokens": 9}, **key)
            assert (status, told["content"][0]["text"]) == (200, str(number))
            assert len(session.trajectories(1.0)) == 2


async def test_a_certificate_that_is_not_the_workers_gets_no_key(router: RouterProcess) -> None:
    async with running(router, Interface("0.0.0.0", "127.0.0.1")) as run:
        first, second = run.at.values()
        run.router.tell({"rollout/0": AgentsAt("a1", first.url, second.fingerprint)})
        asked = run.post(CHAT, ASKED, run.sessions["rollout/0"].api_key)
        calling = asyncio.create_task(asked)
        run.router.tell({})
        assert await calling == (410, "session_lost")
        assert run.engines["rollout/0"].sent == []


async def test_strangers_get_nothing(router: RouterProcess) -> None:
    async with running(router) as run:
        name = SessionName("rollout/0", "a1", 1)
        key, foreign = run.sessions["rollout/0"].api_key, SessionKeys(b"o" * 32)
        wrong = ["", "x", key[:-1], key + "0", key.upper(), foreign.key_of(name), foreign.run_key]
        wrong += [key.replace("rollout/0", "rollout/1"), key.replace("-1-", "-2-"), KEYS.run_key]
        for told in wrong:
            assert await run.post(CHAT, ASKED, told) == (401, "invalid_api_key"), told
        for told in [*wrong[:-1], key]:
            for path in ("/episodes", "/episodes/rollout.0.a1.1/reward"):
                assert await run.post(path, {"reward": 1}, told) == (401, "invalid_api_key"), told
        never = KEYS.key_of(SessionName("rollout/0", "a1", 7))
        assert await run.post(CHAT, ASKED, never) == (404, "unknown_episode")
        large = b" " * (MAX_BODY_BYTES + 1)
        assert await run.post(CHAT, large, key) == (413, "body_too_large")
        assert await run.post(CHAT, large, "x") == (401, "invalid_api_key")
        assert [engine.sent for engine in run.engines.values()] == [[], []]


async def test_paths_and_ids_lead_nowhere_else(router: RouterProcess) -> None:
    async with running(router) as run:
        inner = run.at["rollout/0"].url.rpartition(":")[2]
        for told in (
            *("..", "%2e", "../../v1/chat/completions", "rollout.0.a1", "rollout.0.a1.1.1"),
            *("rollout/0.a1.1", "rollout.0.a1.1?x=/../", "rollout.0.a1.1#", "rollout.0.a1.1\u0660"),
            *("rollout.00.a1.1", "rollout.0.a1.01"),
            *("rollout.0.a1.-1", "rollout.0.a1.1%00", f"127.0.0.1:{inner}.a1.1", "x" * 5000),
        ):
            got = await run.post(f"/episodes/{told}/reward", {"reward": 1}, KEYS.run_key)
            assert got[0] == 404, (told, got)
        for path in (
            "/undelivered",
            "/v1/models",
            "/",
            "/episodes/",
            "//episodes",
            "/x/../episodes",
        ):
            head = f"POST {path} HTTP/1.1", "Host: x", f"x-api-key: {KEYS.run_key}"
            raw = "\r\n".join((*head, "Content-Length: 0", "Connection: close", "", ""))
            assert b" 404 " in await run.sent(raw.encode()), path
        for name, expected in (
            ("rollout.0.a1.7", (404, "unknown_episode")),
            ("rollout.0.a1.1", (409, "session_ended")),  # open, but not offered
            ("rollout.0.b2.1", (410, "session_lost")),
            ("rollout.9.a1.1", (410, "session_lost")),  # nor is it to come
        ):
            got = await run.post(f"/episodes/{name}/reward", {"reward": 1}, KEYS.run_key)
            assert got == expected


async def test_what_is_smuggled_in_a_request_is_no_request(router: RouterProcess) -> None:
    async with running(router) as run:
        run.engines["rollout/0"].will_say("0<|im_end|>")
        run.engines["rollout/1"].will_say("1<|im_end|>")
        keys = [session.api_key for session in run.sessions.values()]
        body = json.dumps(ASKED).encode()

        def head(key: str, *lines: str) -> bytes:
            told = f"POST {CHAT} HTTP/1.1", "Host: x", f"Authorization: Bearer {key}", *lines
            return "\r\n".join((*told, "", "")).encode()

        inner = head(keys[1], f"Content-Length: {len(body)}") + body
        chunk = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
        both = head(keys[0], f"Content-Length: {len(chunk)}", "Transfer-Encoding: chunked")
        for raw in (
            both + chunk + inner,
            head(keys[0], "Content-Length: 3", f"Content-Length: {len(body)}") + body + inner,
            head(keys[0], "Transfer-Encoding: chunked, identity") + chunk + inner,
            head(keys[0], "Transfer-Encoding : chunked") + chunk + inner,
            head(keys[0], "X: a\rAuthorization: b", f"Content-Length: {len(body)}") + body + inner,
        ):
            told = await run.sent(raw)
            assert told.startswith(b"HTTP/1.0 400") or told.startswith(b"HTTP/1.1 400"), told
        assert [engine.sent for engine in run.engines.values()] == [[], []]
        # of two keys one counts, and a worker never hears of the other
        twice = head(keys[0], f"Authorization: Bearer {keys[1]}", "Connection: close")
        twice = twice[:-2] + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        assert b'"0"' in await run.sent(twice)
        assert run.engines["rollout/1"].sent == []


async def test_the_page_of_another_site_gets_nothing_and_may_read_nothing(
    router: RouterProcess,
) -> None:
    """It has no key: a browser sends none by itself, and asks before it sends a header."""
    async with running(router) as run:
        origin = {"Origin": "http://evil.example", "Host": "evil.example"}
        assert await run.post("/episodes", b"{}", **origin) == (401, "invalid_api_key")
        asks = {**origin, "Access-Control-Request-Method": "POST"}
        asks["Access-Control-Request-Headers"] = "authorization"
        async with run.client.options("/episodes", headers=asks) as answer:
            assert answer.status == 404
            assert not [name for name in answer.headers if name.startswith("Access-Control")]


async def test_a_stream_passes_through_as_it_comes_and_breaks_off_with_its_worker(
    router: RouterProcess,
) -> None:
    async with running(router) as run:
        name, session = next(iter(run.sessions.items()))
        hold_midway(run.engines[name])
        run.engines[name].will_say("hello<|im_end|>")
        key = {"Authorization": f"Bearer {session.api_key}"}
        async with run.client.post(CHAT, json={**ASKED, "stream": True}, headers=key) as answer:
            await until_it_says("hel", answer)
            run.servers[name]._soon(_abort_all(run.servers[name]._runner))
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()


def hold_midway(engine: ScriptedEngine) -> None:
    """It says three tokens before it waits."""
    whole = engine.generate

    async def held(*asked: Any, **how: Any) -> Any:
        if not engine.may_answer.is_set():
            how["on_tokens"](engine.answers[0][:3])
            await engine.may_answer.wait()
            how["on_tokens"] = lambda tokens: None
        return await whole(*asked, **how)

    engine.generate = held  # type: ignore[method-assign]
    engine.may_answer.clear()


async def until_it_says(text: str, answer: aiohttp.ClientResponse) -> None:
    async with asyncio.timeout(LIMIT_S):
        while text.encode() not in await answer.content.readuntil(b"\n\n"):
            pass


def _abort_all(runner: Any) -> Any:
    """Ends connections as a worker's death does."""

    def abort() -> None:
        for connection in runner.server.connections:
            connection.transport.abort()

    return abort


async def test_a_worker_that_dies_is_waited_for_until_its_next_life_or_that_there_is_none(
    router: RouterProcess,
) -> None:
    async with running(router) as run:
        key = run.sessions["rollout/0"].api_key
        await run.servers["rollout/0"].close()
        calling = asyncio.create_task(run.post(CHAT, ASKED, key))
        others = {"rollout/1": run.at["rollout/1"]}
        run.router.tell(others, "rollout/0")
        run.router.tell(others)
        assert await calling == (410, "session_lost")
        headers = {"Authorization": f"Bearer {key}"}
        async with run.client.post(CHAT, json=ASKED, headers=headers) as answer:
            assert "rollout/0 of this episode has left" in (await answer.json())["error"]["message"]
        # a next life that has no journal of the session says the same
        run.router.tell({**others, "rollout/0": AgentsAt("b2", others["rollout/1"].url)})
        assert await run.post(CHAT, ASKED, key) == (410, "session_lost")


async def test_an_answer_that_its_client_did_not_take_is_not_trained(
    router: RouterProcess,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = threading.Event()

    def note(session: Session, delivery: str) -> None:
        note_undelivered(session, delivery)
        told.set()

    note_undelivered = Session.note_undelivered
    monkeypatch.setattr(Session, "note_undelivered", note)
    async with running(router) as run:
        session, engine = run.sessions["rollout/0"], run.engines["rollout/0"]
        hold_midway(engine)
        engine.will_say("hello<|im_end|>", "short<|im_end|>")
        key = {"Authorization": f"Bearer {session.api_key}"}
        async with run.client.post(CHAT, json={**ASKED, "stream": True}, headers=key) as answer:
            await until_it_says("hel", answer)
            answer.close()
        await run.post("/", {})  # by its answer the end of that connection has been noticed, too
        engine.may_answer.set()
        assert await asyncio.to_thread(told.wait, LIMIT_S)
        assert session.trajectories(1.0) == []
        other = {"model": "policy", "messages": [{"role": "user", "content": "and now"}]}
        assert (await run.post(CHAT, other, session.api_key))[0] == 200
        (row,) = session.trajectories(1.0)
        assert row.metrics["agent/undelivered"] == 1.0


async def test_an_episode_is_claimed_and_ended_once(router: RouterProcess) -> None:
    config = AgentsConfig(idle_timeout_s=600.0)
    async with running(router) as run:
        assert await run.post("/episodes", {}, KEYS.run_key) == (429, "no_episode")
        waits = {
            name: asyncio.create_task(server.wait_outside(session.api_key, {"q": name}, config))
            for (name, server), session in zip(
                run.servers.items(), run.sessions.values(), strict=True
            )
        }
        for engine in run.engines.values():
            engine.will_say("hello<|im_end|>")
        claimed = {}
        async with asyncio.timeout(LIMIT_S):
            while len(claimed) < 2:
                status, told = await run.post("/episodes", {}, KEYS.run_key)
                if status == 200:
                    claimed[told["row"]["q"]] = told
        assert await run.post("/episodes", {}, KEYS.run_key) == (429, "no_episode")
        for name, told in claimed.items():
            assert told["base_url"] == f"{run.router.url}/v1"
            assert told["api_key"] == run.sessions[name].api_key

        async def ends(name: str, how: str, body: Any) -> tuple[int, Any]:
            path = f"/episodes/{claimed[name]['id']}/{how}"
            return await run.post(path, body, KEYS.run_key)

        assert await ends("rollout/0", "reward", {"reward": 1}) == (
            400,
            "invalid_reward",
        )  # no call
        assert (await run.post(CHAT, ASKED, claimed["rollout/0"]["api_key"]))[0] == 200
        for wrong in (
            *(b'{"reward": NaN}', b'{"reward": 1e999}', b"[1]", b"1", b"\xff"),
            *({}, {"reward": "1"}, {"reward": None}, {"reward": True}, {"reward": [1]}),
            *(
                {"reward": {}},
                {"reward": {"nobody": 1}},
                {"reward": 10**400},
                {"reward": 1, "x": 2},
            ),
        ):
            assert (await ends("rollout/0", "reward", wrong))[0] == 400, wrong
        assert (await ends("rollout/0", "reward", {"reward": 0.5}))[0] == 200
        assert await waits["rollout/0"] == 0.5
        for how in ("reward", "reject"):
            assert await ends("rollout/0", how, {}) == (409, "session_ended")

        assert await ends("rollout/1", "reject", {"reason": 7}) == (400, "invalid_reason")
        assert (await ends("rollout/1", "reject", {"reason": "out of paper"}))[0] == 200
        with pytest.raises(AgentError, match="out of paper") as rejected:
            await waits["rollout/1"]
        assert rejected.value.kind == "agent_rejected"
        assert await ends("rollout/1", "reward", {"reward": 1}) == (409, "session_ended")


@pytest.mark.parametrize(
    ("limits", "kind"),
    [({"idle_timeout_s": 0.2}, "agent_idle"), ({"episode_timeout_s": 0.2}, "agent_timeout")],
)
async def test_an_agent_outside_has_limits_from_its_claim_on(
    router: RouterProcess, limits: dict[str, float], kind: str
) -> None:
    async with running(router) as run:
        server, session = run.servers["rollout/0"], run.sessions["rollout/0"]
        waiting = asyncio.create_task(
            server.wait_outside(session.api_key, {}, AgentsConfig(**limits))
        )
        await asyncio.sleep(0.5)
        assert not waiting.done()  # nobody has claimed it
        status, claimed = await run.post("/episodes", {}, KEYS.run_key)
        assert status == 200
        with pytest.raises(AgentError) as rejected:
            await waiting
        assert rejected.value.kind == kind
        path = f"/episodes/{claimed['id']}/reward"  # the session itself is still open
        for call in (path, {"reward": 1}, KEYS.run_key), (CHAT, ASKED, session.api_key):
            assert await run.post(*call) == (410, "session_lost")
