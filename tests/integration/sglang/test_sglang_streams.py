"""Answers of real servers that are told while they are sampled.

`test_sglang_failures.py` has those across updates and the death of a server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest
from integration.sglang.policies import Policies
from integration.sglang.test_sglang_generation import Numbers, tokens

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.engine import ServerEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
LONG = GenerationConfig(max_new_tokens=900)


@pytest.mark.parametrize("settings", [{}, {"top_k": 5}])
async def test_what_is_told_is_the_answer(
    engine: ServerEngine, policies: Policies, settings: dict[str, float]
) -> None:
    prompt, sampling, told = [4, 5, 6], tokens(40, **settings), list[int]()
    answer = await engine.generate(prompt, sampling, on_tokens=told.extend)
    assert told == answer.token_ids
    assert (len(answer.token_ids), answer.finish_reason) == (40, "length")
    if settings:
        policies.check_truncated(prompt, answer, sampling)
    else:
        policies.check(prompt, answer)


async def test_a_string_ends_a_stream(
    engine: ServerEngine, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "tokenizer", Numbers())
    prompt, sampling, told = [4, 5, 7], tokens(200, temperature=0.0), list[int]()
    free = await engine.generate(prompt, sampling)
    sampling.stop = [Numbers().decode(free.token_ids[67:70])[:-1]]
    texts = (Numbers().decode(free.token_ids[:n]) for n in range(201))
    length = next(n for n, text in enumerate(texts) if sampling.stop[0] in text)
    stopped = await engine.generate(prompt, sampling, on_tokens=told.extend)
    assert told == stopped.token_ids == free.token_ids[:length]
    assert stopped.finish_reason == "stop"
    policies.check(prompt, stopped)


async def test_what_a_callback_raises_ends_the_answer_on_its_server(
    engine: ServerEngine, until: Until
) -> None:
    def refuse(token_ids: Sequence[int]) -> None:
        raise LookupError("enough")

    with pytest.raises(LookupError, match="enough"):
        await engine.generate([5, 6], LONG, on_tokens=refuse)
    await until(lambda: engine.stats()["occupied_places"] == 0)
