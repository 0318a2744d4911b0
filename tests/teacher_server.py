"""A model behind HTTP, asked for log-probabilities as SGLang and vLLM are; float64.

`/generate` and `/v1/completions` have the shapes of SGLang 0.5 and of vLLM 0.11.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
from aiohttp import web

STATE: web.AppKey[tuple[Any, Any]] = web.AppKey("state", tuple)


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """[T, V] before each token; of the first one NaN."""
    with torch.no_grad():
        found = model(torch.tensor([ids])).logits[0].log_softmax(-1).roll(1, 0)
    found[0] = torch.nan
    return found


async def generate(request: web.Request) -> web.Response:
    model, tokenizer = request.app[STATE]
    body = await request.json()
    ids, num = body["input_ids"], body.get("top_logprobs_num", 0)
    text = (lambda it: tokenizer.decode([it])) if body.get("return_text_in_logprobs") else None
    found = logprobs_of(model, ids)
    own, tops = list[Any](), list[Any]()
    for place in range(body["logprob_start_len"], len(ids)):
        values, tokens = found[place].topk(num)
        is_first = not own
        mine = None if is_first else found[place, ids[place]].item()
        own.append([mine, ids[place], text and text(ids[place])])
        pairs = zip(values.tolist(), tokens.tolist(), strict=True)
        tops.append(None if is_first else [[value, it, text and text(it)] for value, it in pairs])
    meta = {"finish_reason": {"type": "length"}, "input_token_logprobs": own}
    return web.json_response(
        {"text": "", "meta_info": meta | ({"input_top_logprobs": tops} if num else {})}
    )


async def complete(request: web.Request) -> web.Response:
    model, tokenizer = request.app[STATE]
    body = await request.json()
    ids, found = body["prompt"], logprobs_of(model, body["prompt"])
    tables: list[Any] = [None]
    for place in range(1, len(ids)):
        order = found[place].argsort(descending=True).tolist()
        shown = dict.fromkeys([ids[place], *order[: body["prompt_logprobs"]]])
        tables.append(
            {
                str(it): {
                    "logprob": found[place, it].item(),
                    "rank": order.index(it) + 1,
                    "decoded_token": tokenizer.decode([it]),
                }
                for it in shown
            }
        )
    choice = {"index": 0, "text": "?", "finish_reason": "length", "prompt_logprobs": tables}
    return web.json_response({"id": "cmpl-1", "object": "text_completion", "choices": [choice]})


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """The address of a server, while it runs."""
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving(model: Any, tokenizer: Any) -> AsyncIterator[str]:
    """The address of a server of this model."""
    app = web.Application()
    app[STATE] = model, tokenizer
    app.router.add_post("/generate", generate)
    app.router.add_post("/v1/completions", complete)
    async with listening(app) as url:
        yield url
