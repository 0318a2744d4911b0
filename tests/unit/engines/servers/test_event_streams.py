"""Streams of real HTTP, as SGLang and vLLM write them, whole and broken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web
from asked_servers import Handler, serving

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.client import ServedAdapter, ServerClient
from areal_sc.engines.servers.requests import AnswerPart, CompletionRequest
from areal_sc.engines.servers.sglang.client import SGLangClient
from areal_sc.engines.servers.vllm.client import VLLMClient
from areal_sc.errors import ConfigError, EngineFailed, PeerLost, ProtocolError, ServerBusy

TOKENS, LOGPROBS = [7, 8, 9, 5], [-0.5, -1.5, -2.5, -3.5]
SPANS = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 4}]
DONE = b"data: [DONE]\n\n"


def request(**sampling: Any) -> CompletionRequest:
    return CompletionRequest(
        prompt=[1, 2],
        sampling=GenerationConfig(**sampling),
        max_new_tokens=9,
        length_reason="length",
        stop_token_ids=(5,),
        is_truncated=bool(sampling.get("top_k")),
        on_tokens=lambda token_ids: None,
    )


def event(answer: Any) -> bytes:
    return b"data: " + json.dumps(answer).encode() + b"\n\n"


def sglang_part(start: int, end: int, **meta: Any) -> dict[str, Any]:
    """Tokens from `start` to `end`, which is also how many there are up to here."""
    entries = [[it, token, None] for it, token in zip(LOGPROBS, TOKENS, strict=True)][start:end]
    counts = {"prompt_tokens": 2, "cached_tokens": 1, "completion_tokens": end}
    own = {"finish_reason": None, "output_token_logprobs": entries, "weight_version": "2"}
    return {"output_ids": TOKENS[start:end], "meta_info": own | counts | meta}


ENDED = {"finish_reason": {"type": "stop", "matched": 5}, "weight_versions": SPANS}
INCREMENTAL = [sglang_part(0, 1), sglang_part(1, 3), sglang_part(3, 4, **ENDED)]
CUMULATIVE = [sglang_part(0, 1), sglang_part(0, 3), sglang_part(0, 4, **ENDED)]


def vllm_part(start: int, end: int, **choice: Any) -> dict[str, Any]:
    entries = [
        {"token_id": token, "logprob": it, "rank": 1}
        for it, token in zip(LOGPROBS[start:end], TOKENS[start:end], strict=True)
    ]
    own = {"index": 0, "finish_reason": None, "weight_versions": None, **choice}
    return {"choices": [own | {"token_ids": TOKENS[start:end], "logprobs": {"content": entries}}]}


USAGE = {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
VLLM = [
    *(vllm_part(0, 1), vllm_part(1, 3)),
    vllm_part(3, 4, finish_reason="stop", weight_versions=SPANS),
    {"choices": [], "usage": USAGE},
]


def streaming(content: bytes, piece_bytes: int, bodies: list[Any], *, breaks: bool) -> Handler:
    """Sends the content in pieces that know nothing of events."""

    async def answer(asked: web.Request) -> web.StreamResponse:
        bodies.append(await asked.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(asked)
        for start in range(0, len(content), piece_bytes):
            await response.write(content[start : start + piece_bytes])
        if breaks:
            assert asked.transport
            asked.transport.abort()
        return response

    return answer


async def parts_of(
    kind: type[ServerClient], content: bytes, piece_bytes: int = 1 << 20, *, breaks: bool = False
) -> tuple[list[AnswerPart], Any]:
    bodies: list[Any] = []
    async with serving(kind, streaming(content, piece_bytes, bodies, breaks=breaks)) as client:
        parts = [part async for part in client.stream_answer(request(), None)]
    return parts, bodies[0]


@pytest.mark.parametrize("piece_bytes", [1, 7, 1 << 20])
@pytest.mark.parametrize(
    ("kind", "events"),
    [(SGLangClient, INCREMENTAL), (SGLangClient, CUMULATIVE), (VLLMClient, VLLM)],
)
async def test_the_parts_of_a_stream(
    kind: type[ServerClient], events: Sequence[Any], piece_bytes: int
) -> None:
    content = b"".join(map(event, events)) + DONE
    parts, body = await parts_of(kind, content, piece_bytes)
    assert body["stream"] is True
    assert [part.token_ids for part in parts] == [[7], [8, 9], [5]]
    assert [logprob for part in parts for logprob in part.logprobs] == LOGPROBS
    assert [part.versions for part in parts] == [[], [], [1, 1, 1, 2]]
    assert [part.finish for part in parts] == ["", "", "stop"]
    assert sum(part.num_prompt_tokens for part in parts) == 2
    assert sum(part.num_cached_tokens for part in parts) == 1


@pytest.mark.parametrize(
    ("kind", "events", "field"),
    [(SGLangClient, INCREMENTAL, "lora_path"), (VLLMClient, VLLM, "model")],
)
async def test_a_stream_of_an_adapter_has_the_version_of_that(
    kind: type[ServerClient], events: Sequence[Any], field: str
) -> None:
    bodies: list[Any] = []
    content = b"".join(map(event, events)) + DONE
    async with serving(kind, streaming(content, 1 << 20, bodies, breaks=False)) as client:
        client.adapter = ServedAdapter("policy-6", 6)
        parts = [part async for part in client.stream_answer(request(), None)]
    assert bodies[0][field] == "policy-6"
    assert [part.versions for part in parts] == [[], [], [6, 6, 6, 6]]


@pytest.mark.parametrize(
    ("kind", "last"),
    [
        (SGLangClient, sglang_part(0, 0, finish_reason={"type": "abort"}, weight_versions=[])),
        (VLLMClient, {**vllm_part(0, 0, finish_reason="abort"), "usage": USAGE}),
    ],
)
async def test_an_answer_that_is_aborted_before_its_first_token(
    kind: type[ServerClient], last: Any
) -> None:
    [part], _ = await parts_of(kind, event(last) + DONE)
    assert (part.token_ids, part.versions, part.finish) == ([], [], "abort")


@pytest.mark.parametrize(("kind", "first"), [(SGLangClient, INCREMENTAL[0]), (VLLMClient, VLLM[0])])
async def test_streams_that_fail_after_their_first_part(
    kind: type[ServerClient], first: Any
) -> None:
    failed = event({"error": {"message": "out of memory", "code": 500}})
    for content, breaks, error, message in (
        (b"", True, PeerLost, "no answer from|broke off"),
        (b"", False, PeerLost, "broke off in the middle"),
        (failed, False, EngineFailed, "failed: out of memory"),
        (b"data: {\n\n", False, ProtocolError, "did not answer with JSON"),
        (event({"meta_info": 3, "choices": 3}), False, ProtocolError, "cannot be read"),
    ):
        handler = streaming(event(first) + content, 1 << 20, [], breaks=breaks)
        async with serving(kind, handler) as client:
            parts = aiter(client.stream_answer(request(), None))
            if not breaks:
                assert (await anext(parts)).token_ids == [7]
            with pytest.raises(error, match=message):
                [part async for part in parts]


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_client_that_is_given_up_in_the_middle_of_an_answer(is_streamed: bool) -> None:
    """Its server is lost, though the connection still stands."""
    has_begun, ends = asyncio.Event(), asyncio.Event()

    async def answer_slowly(asked: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(asked)
        await response.write(event(INCREMENTAL[0]))
        has_begun.set()
        await ends.wait()
        return response

    async with serving(SGLangClient, answer_slowly) as client:
        parts = aiter(client.stream_answer(request(), None))
        if is_streamed:
            assert (await anext(parts)).token_ids == [7]
            reading: Any = asyncio.create_task(anext(parts))  # type: ignore[arg-type]
        else:
            reading = asyncio.create_task(client.answer(request(), None))
        await has_begun.wait()
        for _ in range(9):
            await asyncio.sleep(0)
        await client.close()
        with pytest.raises(PeerLost, match="no answer from"):
            await reading
        ends.set()


async def test_a_request_that_is_refused() -> None:
    """At once by its status; or, as SGLang does it, in a stream that has begun."""
    for status, error in ((503, ServerBusy), (400, EngineFailed), (401, ConfigError)):

        async def refuse(asked: web.Request, status: int = status) -> web.StreamResponse:
            return web.json_response({"message": "no"}, status=status)

        async with serving(SGLangClient, refuse) as client:
            with pytest.raises(error):
                await anext(client.stream_answer(request(), None))
    for status, error in ((503, ServerBusy), (400, EngineFailed)):
        reason = {"type": "abort", "message": "the queue is full", "status_code": status}
        with pytest.raises(error, match=r"no request now|the queue is full"):
            await parts_of(SGLangClient, event(sglang_part(0, 0, finish_reason=reason)) + DONE)


async def test_an_answer_that_was_held_and_is_aborted_tells_its_logprobs_no_more() -> None:
    reason = {"finish_reason": {"type": "abort"}, "weight_versions": SPANS[:1]}
    for lists in ({"output_token_logprobs": None}, {}):
        meta: Any = {"output_token_sampling_logprobs": LOGPROBS[:3]}
        events = [sglang_part(0, 3, **meta), sglang_part(0, 3, **reason, **lists)]
        content = b"".join(map(event, events)) + DONE
        handler = streaming(content, 1 << 20, [], breaks=False)
        async with serving(SGLangClient, handler) as client:
            asked = client.stream_answer(request(top_k=2), 2)
            parts = [part async for part in asked]
        assert [part.token_ids for part in parts] == [TOKENS[:3], []]
        assert (parts[1].versions, parts[1].finish) == ([1, 1, 1], "abort")


async def test_parts_that_do_not_fit_together() -> None:
    two = sglang_part(0, 2)
    for wrong in (sglang_part(1, 4), sglang_part(0, 1)):
        with pytest.raises(ProtocolError, match="a part of an answer of SGLang has"):
            await parts_of(SGLangClient, event(two) + event(wrong) + DONE)
    short = sglang_part(2, 4, finish_reason={"type": "stop"}, weight_versions=SPANS[:1])
    with pytest.raises(ProtocolError, match="cover not 4 tokens but 3"):
        await parts_of(SGLangClient, event(two) + event(short) + DONE)
    wrong = vllm_part(1, 4, finish_reason="stop", weight_versions=SPANS[:1])
    with pytest.raises(ProtocolError, match="cover not 4 tokens but 3"):
        await parts_of(VLLMClient, event(VLLM[0]) + event(wrong) + DONE)
