"""The server of sessions over real sockets: keys, bad requests, clients that go away, the end."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import chat_templates as templates
import pytest
from scripted_engine import ScriptedEngine, check_trained, engine_for
from waiting import until

from areal_sc.agents.http import MAX_NESTING
from areal_sc.agents.server import MAX_BODY_BYTES, AgentServer
from areal_sc.agents.session import MAX_RUNNING_CALLS, Session, SessionSettings
from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import PLAIN, Completion, OnTokens, RequestOptions
from areal_sc.errors import NeverWorks, WorkerError

SAMPLING = GenerationConfig(max_new_tokens=64)
TOOL = {"type": "function", "function": {"name": "weather"}}
LIMIT_S = 60.0


@asynccontextmanager
async def serving(engine: ScriptedEngine) -> AsyncIterator[Session]:
    """An open session."""
    server = AgentServer("rollout-0")
    try:
        async with server.open(engine, SAMPLING, SessionSettings()) as session:
            yield session
    finally:
        await server.close()


@asynccontextmanager
async def client_of(session: Session) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {session.api_key}"}
    pool = aiohttp.TCPConnector(limit=0)
    url = f"{session.base_url}/"
    async with aiohttp.ClientSession(url, headers=headers, connector=pool) as client:
        yield client


def asks(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}], **more}


async def post(
    client: aiohttp.ClientSession, body: Any, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = io.BytesIO(raw)
    async with client.post("chat/completions", data=sent, headers=headers) as response:
        return response.status, await response.json()


def events(text: str) -> list[Any]:
    """What the events of a stream say."""
    told = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [it if it == "[DONE]" else json.loads(it) for it in told]


async def sent_by_hand(session: Session, body: dict[str, Any]) -> socket.socket:
    """A connection whose request has been sent, with hardly any room for the answer."""
    raw = json.dumps(body).encode()
    port = int(session.base_url.split(":")[2].partition("/")[0])
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
        f"Authorization: Bearer {session.api_key}\r\n\r\n"
    )
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.to_thread(connection.connect, ("127.0.0.1", port))
    await asyncio.to_thread(connection.sendall, head.encode() + raw)
    return connection


async def test_calls_over_http_are_trained_as_they_were_sampled() -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>", "again<|im_end|>")
    async with serving(engine) as session, client_of(session) as client:
        status, first = await post(client, asks("hi", temperature=0.3))
        assert status == 200
        body = asks("hi")
        body["messages"] += [first["choices"][0]["message"], {"role": "user", "content": "more"}]
        status, second = await post(client, body)
        assert status == 200
        assert second["choices"][0]["message"]["content"] == "again"
        assert second["id"] != first["id"]
        assert second["usage"]["prompt_tokens"] == len(engine.sent[1])
        rows = session.trajectories(0.5)
        assert len(rows) == 1
        check_trained(engine, rows)
        by_id = {first["id"]: 1.0, second["id"]: 2.0}
        (row,) = session.trajectories(by_id, discount=0)
        assert [value for value, _ in row.returns] == [1.0, 2.0]


class HeldMidway(ScriptedEngine):
    """Tells its first token, and holds the others back."""

    async def generate(
        self,
        input_ids: Sequence[int],
        sampling: GenerationConfig,
        options: RequestOptions = PLAIN,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        assert on_tokens is not None
        on_tokens(self.answers[0][:1])
        return await super().generate(input_ids, sampling)


async def test_a_stream_has_the_text_while_it_is_sampled() -> None:
    engine = HeldMidway(templates.tokenizer_for(templates.QWEN))
    engine.may_answer.clear()
    engine.will_say("the answer is sunny<|im_end|>")
    body = asks("hi", stream=True, stream_options={"include_usage": True}, logprobs=True)
    async with serving(engine) as session, client_of(session) as client:
        async with client.post("chat/completions", json=body) as response:
            assert response.content_type == "text/event-stream"
            begun = b""
            while begun.count(b"\n\n") < 2:
                begun += await response.content.readany()
            engine.may_answer.set()
            *chunks, usage, done = events(begun.decode() + await response.text())
        choices = [it["choices"][0] for it in chunks]
        pieces = [it["delta"].get("content") for it in choices]
        assert pieces[0] == ""
        assert pieces[1]
        assert pieces[2]
        assert pieces[1] + pieces[2] == "the answer is sunny"
        assert choices[0]["delta"]["role"] == "assistant"
        assert [it["finish_reason"] for it in choices] == [None, None, None, "stop"]
        tokens = choices[-1]["logprobs"]["content"]
        assert [it["logprob"] for it in tokens] == [-1 - n / 1000 for n in range(len(tokens))]
        assert usage["choices"] == []
        assert usage["usage"]["completion_tokens"] == len(engine.sampled[0])
        assert done == "[DONE]"
        check_trained(engine, session.trajectories(1.0))


async def test_keys_and_bad_requests() -> None:
    engine = engine_for(templates.QWEN, max_context_tokens=100)
    async with serving(engine) as session, client_of(session) as client:
        wrong = ("", "x", session.api_key[:-1] + "z", session.api_key.replace("-1-", "-2-", 1))
        for key in (*wrong, "Ä", f"areal-rollout-0-{'9' * 30}-0"):
            status, body = await post(client, asks("hi"), {"Authorization": f"Bearer {key}"})
            assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        bad: list[tuple[Any, int, str]] = [
            (b"{", 400, "invalid_json"),
            (b"[]", 400, "invalid_json"),
            (b"[" * 100_000, 400, "invalid_json"),
            (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400, "invalid_json"),
            (b'{"messages": "\xff"}', 400, "invalid_json"),
            (b" " * (MAX_BODY_BYTES + 1), 413, "body_too_large"),
            (asks("hi", n=2), 400, "invalid_body"),
            (asks("hi", responce_format={}), 400, "invalid_body"),
            ({"messages": [{"role": "wizard", "content": "hi"}]}, 400, "invalid_body"),
            ({"messages": []}, 400, "invalid_call"),
            (asks("hi " * 100), 400, "context_length_exceeded"),
        ]
        for sent, expected, code in bad:
            status, body = await post(client, sent)
            assert (status, body["error"]["code"]) == (expected, code)
        async with client.get("models") as response:
            assert response.status == 404
            assert "unknown_path" in await response.text()
        assert session.counts["refused"] == len(bad)
        assert session.trajectories(1.0) == []
        engine.will_say("hello<|im_end|>")  # and still it answers
        bare = {"Authorization": "", "x-api-key": session.api_key}
        assert (await post(client, asks("hi"), bare))[0] == 200


async def test_a_path_that_is_not_there_is_refused() -> None:
    async with serving(engine_for(templates.QWEN)) as session, client_of(session) as client:
        for path in ("messages/count_tokens", "models", "responses/resp_1", "messages_of_others"):
            async with client.post(path) as response:
                assert response.status == 404
                error = (await response.json())["error"]
            assert error["code"] == "unknown_path"
            assert error["message"].startswith("there is no POST")


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_response_tells_the_sampling_that_it_has(is_streamed: bool) -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>")
    asked = {"input": "hi", "temperature": 0.3, "top_p": 0.5, "max_output_tokens": 10_000}
    async with (
        serving(engine) as session,
        client_of(session) as client,
        client.post("responses", json={**asked, "stream": is_streamed}) as response,
    ):
        text = await response.text()
    bodies = [json.loads(text)] if not is_streamed else []
    for event in text.split("\n\n") if is_streamed else ():
        told = json.loads(event.partition("data: ")[2] or "{}")
        bodies += [told["response"]] if "response" in told else []
    assert len(bodies) == (3 if is_streamed else 1)
    for body in bodies:
        assert (body["temperature"], body["top_p"]) == (SAMPLING.temperature, SAMPLING.top_p)
        assert body["max_output_tokens"] == SAMPLING.max_new_tokens


async def test_a_session_that_ended_or_was_given_up_says_so() -> None:
    engine = engine_for(templates.QWEN)
    server = AgentServer("rollout-0")
    async with server.open(engine, SAMPLING, SessionSettings()) as ended:
        pass
    with pytest.raises(LookupError):
        async with server.open(engine, SAMPLING, SessionSettings()) as lost:
            raise LookupError("no more")
    for session, expected, told in ((ended, 409, "has ended"), (lost, 410, "no more")):
        async with client_of(session) as client:
            status, body = await post(client, asks("hi"))
            assert status == expected
            assert told in body["error"]["message"]
    await server.close()


async def test_too_many_calls_are_told_when_to_come_again() -> None:
    engine = engine_for(templates.QWEN)
    engine.may_answer.clear()
    engine.will_say(*["hello<|im_end|>"] * MAX_RUNNING_CALLS)
    async with serving(engine) as session, client_of(session) as client:
        calls = [
            asyncio.create_task(post(client, asks(f"hi {n}"))) for n in range(MAX_RUNNING_CALLS)
        ]
        await until(lambda: len(engine.sent) == MAX_RUNNING_CALLS)
        async with client.post("chat/completions", json=asks("one more")) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] == "1"
            assert response.headers["x-should-retry"] == "true"
        engine.may_answer.set()
        assert {status for status, _ in await asyncio.gather(*calls)} == {200}
        check_trained(engine, session.trajectories(1.0))


async def test_a_client_that_goes_away_may_come_back_for_its_answer() -> None:
    engine = engine_for(templates.QWEN)
    engine.may_answer.clear()
    engine.will_say("hello<|im_end|>", "not this one<|im_end|>")
    async with serving(engine) as session, client_of(session) as client:
        connection = await sent_by_hand(session, asks("hi"))
        await until(lambda: engine.sent)
        connection.close()
        [begun] = session._calls
        await until(lambda: begun.is_left)
        engine.may_answer.set()
        await until(lambda: begun.node)
        assert session.trajectories(1.0) == []
        assert (await post(client, asks("hi")))[1]["choices"][0]["message"]["content"] == "hello"
        check_trained(engine, session.trajectories(1.0))
        assert session.counts["retries"] == 1


@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "one"}], ids=["count", "key"])
async def test_a_retry_that_says_so_gets_the_same_answer(headers: dict[str, str]) -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>", "another one<|im_end|>")
    attempts = [{**headers, "x-stainless-retry-count": f"{n}"} for n in range(3)]
    async with serving(engine) as session, client_of(session) as client:
        answers = [(await post(client, asks("hi"), it))[1] for it in attempts]
        assert answers[0] == answers[1] == answers[2]
        check_trained(engine, session.trajectories(1.0))
        again = await post(client, asks("hi"), {"x-stainless-retry-count": "0"})
        assert again[1]["choices"][0]["message"]["content"] == "another one"


@pytest.mark.parametrize(
    ("wrong", "is_for_all"),
    [
        ({"n": 2}, True),
        ({"guided_json": {}}, True),
        ({"parallel_tool_calls": False, "tools": [TOOL]}, True),
        ({"max_tokens": -7}, False),
        ({"messages": [{"role": "user", "content": 3}]}, False),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, False),
    ],
    ids=["n", "unknown", "parallel", "no room", "content", "image"],
)
async def test_of_a_refused_call_is_known_whether_others_would_be(
    wrong: dict[str, Any], is_for_all: bool
) -> None:
    """What stands in the messages may be this row's alone."""

    async def fail() -> None:
        engine = engine_for(templates.QWEN)
        async with serving(engine) as session, client_of(session) as client:
            assert (await post(client, asks("hi") | wrong))[0] == 400
            raise KeyError

    with pytest.raises(NeverWorks if is_for_all else KeyError):
        await fail()


async def test_an_answer_that_its_client_never_reads_is_not_trained() -> None:
    """It is larger than what the system holds of it, so its last byte is never written."""
    engine = engine_for(templates.QWEN, max_context_tokens=100_000)
    [token] = engine.tokenizer.encode("a", add_special_tokens=False)
    engine.answers.append([token] * 60_000)
    async with serving(engine) as session:
        connection = await sent_by_hand(session, asks("hi", logprobs=True))
        await until(lambda: session._calls and session._calls[0].node)
        [begun] = session._calls
        await asyncio.to_thread(connection.recv, 1024)  # the answer has begun
        connection.close()
        await until(lambda: begun.is_left)
        assert session.trajectories(1.0) == []
        assert not begun.is_delivered


async def test_a_stream_that_breaks_off_says_why() -> None:
    engine = HeldMidway(templates.tokenizer_for(templates.QWEN))
    engine.may_answer.clear()
    engine.will_say("hello<|im_end|>")
    server = AgentServer("rollout-0")
    async with (
        server.open(engine, SAMPLING, SessionSettings()) as session,
        client_of(session) as client,
        client.post("chat/completions", json=asks("hi", stream=True)) as response,
    ):
        assert response.status == 200
        await response.content.readuntil(b"\n\n")
        await server.close()
        *_, last = events(await response.text())
    assert last["error"]["code"] == "session_lost"
    assert session.trajectories(1.0) == []


async def test_there_is_no_thread_before_a_session_or_behind_the_end() -> None:
    engine = engine_for(templates.QWEN)
    engine.may_answer.clear()
    engine.will_say("hello<|im_end|>")

    def threads() -> list[str]:
        return [it.name for it in threading.enumerate() if it.name == "agents"]

    server = AgentServer("rollout-0")
    await server.close()
    assert threads() == []
    async with (
        server.open(engine, SAMPLING, SessionSettings()) as session,
        client_of(session) as client,
    ):
        assert threads() == ["agents"]
        call = asyncio.create_task(post(client, asks("hi")))
        await until(lambda: engine.sent)
        await server.close()
        status, body = await call
        assert (status, body["error"]["code"]) == (410, "session_lost")
    assert threads() == []


async def test_an_episode_whose_engine_failed_fails_though_its_agent_goes_on() -> None:
    engine = engine_for(templates.QWEN)  # it has nothing to say

    async def episode() -> None:
        async with serving(engine) as session, client_of(session) as client:
            assert (await post(client, asks("hi")))[0] == 503
            engine.will_say("hello<|im_end|>")
            assert (await post(client, asks("hi")))[0] == 200

    with pytest.raises(IndexError, match="pop from empty list"):
        await episode()


async def test_a_start_that_failed_is_the_workers_failure_and_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>")
    server = AgentServer("rollout-0")

    def no_file() -> asyncio.AbstractEventLoop:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(asyncio.events, "new_event_loop", no_file)
        episode = replace(engine).episode
        episode._agents = server
        with pytest.raises(WorkerError, match="Too many open files") as raised:
            async with asyncio.timeout(LIMIT_S), episode.open_session():
                pass
        assert episode.failure is raised.value
        await server.close()
    async with (
        server.open(engine, SAMPLING, SessionSettings()) as session,
        client_of(session) as client,
    ):
        assert (await post(client, asks("hi")))[0] == 200
    await server.close()


async def test_the_end_does_not_wait_for_a_thread_that_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("areal_sc.agents.server._END_TIMEOUT_S", 0.01)
    server, goes_on = AgentServer("rollout-0"), threading.Event()
    async with server.open(engine_for(templates.QWEN), SAMPLING, SessionSettings()):
        server._soon(goes_on.wait)
    async with asyncio.timeout(LIMIT_S):
        await server.close()
    assert "is left behind" in caplog.text
    goes_on.set()
    assert server._thread
    await asyncio.to_thread(server._thread.join)


async def test_a_key_of_idempotency_is_of_one_body_under_one_path() -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>")
    key = {"Idempotency-Key": "one"}
    async with serving(engine) as session, client_of(session) as client:
        assert (await post(client, asks("hi"), key))[0] == 200
        status, body = await post(client, asks("another question"), key)
        assert (status, body["error"]["code"]) == (400, "idempotency_key_reused")
        assert body["error"]["message"].startswith("Idempotency-Key: ")
        async with client.post("messages", json=asks("hi"), headers=key) as response:
            assert response.status == 400
        assert (await post(client, asks("hi"), key))[0] == 200
        assert (session.counts["refused"], session.counts["retries"]) == (2, 1)
        check_trained(engine, session.trajectories(1.0))


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
async def test_a_body_that_is_nested_too_deeply_is_refused_before_it_is_a_call(
    opening: str, closing: str
) -> None:
    engine = engine_for(templates.QWEN)
    engine.will_say("hello<|im_end|>")
    body = json.dumps(asks("hi", metadata="NESTED"))
    async with serving(engine) as session, client_of(session) as client:
        for depth in (MAX_NESTING, 460, 990, 100_000):
            nested = opening * depth + "1" + closing * depth
            async with client.post(
                "chat/completions", data=body.replace('"NESTED"', nested)
            ) as response:
                assert response.status == 400
                assert (await response.json())["error"]["code"] == "invalid_json"
        assert (await post(client, asks("hi")))[0] == 200
        assert session.counts["refused"] == 4
        assert len(engine.sent) == 1


async def test_a_broken_body_is_not_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(engine_for(templates.QWEN)) as session:
        for encoding, body in (("gzip", b"{}"), ("deflate", b"\0\1zz")):
            headers = {"Content-Encoding": encoding}
            async with (
                client_of(session) as client,
                client.post("chat/completions", data=body, headers=headers) as response,
            ):
                assert response.status == 400
    assert not [it for it in caplog.records if it.levelname == "ERROR"]


async def test_a_body_that_is_not_of_its_encoding_is_refused_in_the_form_of_its_dialect() -> None:
    async with serving(engine_for(templates.QWEN)) as session:
        told = []
        for path in ("chat/completions", "messages"):
            headers = {"Content-Encoding": "gzip"}
            async with (  # a client each, as the connection breaks behind the answer
                client_of(session) as client,
                client.post(path, data=b"{}", headers=headers) as response,
            ):
                assert response.status == 400
                told.append(await response.json())
        assert told[0]["error"]["code"] == "invalid_encoding"
        assert told[1]["type"] == "error"
        assert session.counts["refused"] == 2
