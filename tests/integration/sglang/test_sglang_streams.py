"""Answers of real servers that are told while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest
from builders import NumberTokenizer
from integration.sglang.policies import Policies
from integration.sglang.test_sglang_generation import tokens

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.engine import ServerEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
LONG = GenerationConfig(max_new_tokens=900)
PROMPTS = [[5 + i, 6, 7 + i] for i in range(6)]


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
    monkeypatch.setattr(engine, "tokenizer", NumberTokenizer())
    prompt, sampling, told = [4, 5, 7], tokens(200, temperature=0.0), list[int]()
    free = await engine.generate(prompt, sampling)
    sampling.stop = [NumberTokenizer().decode(free.token_ids[67:70])[:-1]]
    texts = (NumberTokenizer().decode(free.token_ids[:n]) for n in range(201))
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


async def test_answers_are_told_across_an_update_and_a_lost_connection(
    engine: ServerEngine, policies: Policies, until: Until
) -> None:
    """Each token's log-probability is that of the version which the answer names for it."""
    told: list[list[int]] = [[] for _ in PROMPTS]
    old, new = engine.version, policies.add()
    before = engine.stats()
    tasks = [
        asyncio.create_task(engine.generate(prompt, LONG, on_tokens=own.extend))
        for prompt, own in zip(PROMPTS, told, strict=True)
    ]
    await until(lambda: all(len(own) > 20 for own in told))
    going = [number for number, task in enumerate(tasks) if not task.done()]
    await engine.update_weights(new, policies.source(new))
    lengths = [len(told[number]) for number in going]
    await until(
        lambda: all(
            len(told[number]) > length or tasks[number].done()
            for number, length in zip(going, lengths, strict=True)
        )
    )
    running = engine.server.places.num_running
    for answer_of_server in list(engine.server.client._answers):
        answer_of_server.close()
    answers = await asyncio.gather(*tasks)
    assert told == [answer.token_ids for answer in answers]
    assert all(len(own) == LONG.max_new_tokens for own in told)
    # an answer may have ended on the server before the update, and be read later
    assert all({old, new} >= set(answers[number].versions) for number in going)
    assert any({old, new} == set(answers[number].versions) for number in going)
    policies.check_all(PROMPTS, answers)
    assert engine.stats()["lost_requests"] - before["lost_requests"] >= running
