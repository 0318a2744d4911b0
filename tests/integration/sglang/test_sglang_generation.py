"""What a real server samples, and how the engine reports it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable

import pytest
from builders import NumberTokenizer
from integration.sglang.policies import (
    MAX_CONTEXT,
    TOLERANCE,
    VOCAB_SIZE,
    Generating,
    Policies,
)
from transformers import AutoTokenizer

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.errors import ConfigError, NeverWorks, WorkflowError
from areal_sc.workflows.teachers import Teacher

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
LONG = GenerationConfig(max_new_tokens=900)


def tokens(number: int, **settings: float) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=number, **settings)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
async def test_logprobs_are_those_of_the_request_s_temperature(
    engine: ServerEngine, policies: Policies, temperature: float
) -> None:
    prompts = [[3 + i, 5, 7 + i] for i in range(8)]
    answers = await asyncio.gather(
        *(engine.generate(prompt, tokens(40, temperature=temperature)) for prompt in prompts)
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        policies.check(prompt, answer, temperature)
        assert set(answer.versions) == {engine.version}
    assert len({tuple(answer.token_ids) for answer in answers}) == len(prompts)


async def test_temperatures_do_not_mix_in_one_batch(
    engine: ServerEngine, policies: Policies
) -> None:
    prompt = [9, 8, 7]
    temperatures = [0.5, 1.0, 0.0, 2.0]
    answers = await asyncio.gather(
        *(engine.generate(prompt, tokens(30, temperature=t)) for t in temperatures)
    )
    for answer, temperature in zip(answers, temperatures, strict=True):
        policies.check(prompt, answer, temperature or 1.0)


async def test_greedy_takes_the_most_probable_token(
    engine: ServerEngine, policies: Policies
) -> None:
    prompt = [4, 5, 6]
    first, second = await asyncio.gather(
        *(engine.generate(prompt, tokens(20, temperature=0.0)) for _ in range(2))
    )
    assert first.token_ids == second.token_ids
    assert first.token_ids == policies.greedy(engine.version, prompt, len(first.token_ids))
    policies.check(prompt, first)


@pytest.mark.parametrize(
    "settings", [{"top_k": 5}, {"top_p": 0.6}, {"top_k": 50, "temperature": 0.7}]
)
async def test_truncated_distributions_have_logprobs_of_their_own(
    engine: ServerEngine, policies: Policies, settings: dict[str, float]
) -> None:
    prompt = [11, 12]
    sampling = tokens(40, **settings)
    answer = await engine.generate(prompt, sampling)
    policies.check_truncated(prompt, answer, sampling)


async def test_finish_reasons(engine: ServerEngine, policies: Policies) -> None:
    prompt = [4, 5, 6]
    free = await engine.generate(prompt, tokens(12, temperature=0.0))
    assert (len(free.token_ids), free.finish_reason) == (12, "length")
    stop = free.token_ids[4]
    sampling = GenerationConfig(max_new_tokens=12, temperature=0.0, stop_token_ids=[stop])
    stopped = await engine.generate(prompt, sampling)
    first = free.token_ids.index(stop)
    assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[: first + 1], "stop")
    policies.check(prompt, stopped)


async def test_a_string_ends_an_answer(
    engine: ServerEngine, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In whichever of the pieces that servers are asked for it is complete."""
    monkeypatch.setattr(engine, "tokenizer", NumberTokenizer())
    prompt, sampling = [4, 5, 7], tokens(200, temperature=0.0)
    free = await engine.generate(prompt, sampling)
    for end in (3, 65, 131):  # the second one lies in two pieces
        sampling.stop = [NumberTokenizer().decode(free.token_ids[end - 3 : end])[:-1]]
        stopped = await engine.generate(prompt, sampling)
        texts = (NumberTokenizer().decode(free.token_ids[:n]) for n in range(201))
        assert sampling.stop[0] in NumberTokenizer().decode(stopped.token_ids)
        length = next(n for n, text in enumerate(texts) if sampling.stop[0] in text)
        assert (stopped.token_ids, stopped.finish_reason) == (free.token_ids[:length], "stop")
        policies.check(prompt, stopped)


async def test_the_context_is_used_to_its_last_token(engine: ServerEngine) -> None:
    almost_all = [5] * (MAX_CONTEXT - 3)
    exact = await engine.generate(almost_all, tokens(3, temperature=0.0))
    assert (len(exact.token_ids), exact.finish_reason) == (3, "length")
    more = await engine.generate(almost_all, tokens(4, temperature=0.0))
    assert (more.token_ids, more.finish_reason) == (exact.token_ids, "context")
    one = await engine.generate([5] * (MAX_CONTEXT - 1), tokens(9))
    assert (len(one.token_ids), one.finish_reason) == (1, "context")


async def test_bad_requests_are_refused(engine: ServerEngine) -> None:
    with pytest.raises(WorkflowError, match=f"prompt has {MAX_CONTEXT} tokens"):
        await engine.generate([1] * MAX_CONTEXT, tokens(1))
    with pytest.raises(WorkflowError, match="empty"):
        await engine.generate([], tokens(1))
    with pytest.raises(WorkflowError, match=rf"2\.\.{VOCAB_SIZE}, the model has 0\.\."):
        await engine.generate([2, VOCAB_SIZE], tokens(1))
    with pytest.raises(ConfigError, match=r"generation\.top_p must be"):
        await engine.generate([1], tokens(1, top_p=0.0))


async def test_rows_of_a_group_share_their_prompt(engine: ServerEngine) -> None:
    """The later ones find the prompt in the server's cache."""
    prompts = [[20 + number] * 200 for number in range(4)]
    # one row first: rows that arrive together are prefilled together
    await asyncio.gather(*(engine.generate(prompt, tokens(2)) for prompt in prompts))
    before = engine.stats()
    await asyncio.gather(
        *(engine.generate(prompt, tokens(20)) for prompt in prompts for _ in range(6))
    )
    after = engine.stats()
    shared = after["shared_prompt_tokens"] - before["shared_prompt_tokens"]
    assert shared >= 0.75 * 4 * 6 * 199


async def test_a_cancelled_task_is_ended_on_its_server(
    engine: ServerEngine, until: Until, generating: Generating
) -> None:
    tasks = await generating(
        lambda: [asyncio.create_task(engine.generate([6, 7], LONG)) for _ in range(4)]
    )
    cancelled = engine.stats()["cancelled_tokens"]
    for task in tasks:
        task.cancel()
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(outcome, asyncio.CancelledError)
    await until(lambda: engine.stats()["occupied_places"] == 0)
    await until(lambda: engine.stats()["cancelled_tokens"] > cancelled)
    assert engine.stats()["cancelled_tokens"] < cancelled + 4 * LONG.max_new_tokens


async def test_a_pause_holds_answers_and_requests(
    engine: ServerEngine, policies: Policies, until: Until, generating: Generating
) -> None:
    prompt = [8, 9]
    (running,) = await generating(lambda: [asyncio.create_task(engine.generate(prompt, LONG))])
    await engine.pause()
    late = asyncio.create_task(engine.generate(prompt, tokens(5)))
    held = asyncio.create_task(engine.generate(prompt, LONG))
    await until(lambda: engine.stats()["waiting_requests"] == 2)
    assert engine.server.is_paused
    held.cancel()
    with pytest.raises(asyncio.CancelledError):
        await held
    done, _ = await asyncio.wait({running, late}, timeout=1.0)
    assert not done
    await engine.resume()
    for answer in await asyncio.gather(running, late):
        policies.check(prompt, answer)
        assert answer.finish_reason == "length"
    assert not engine.server.is_paused


async def test_a_server_is_a_teacher(
    engine: ServerEngine, policies: Policies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that its cache has, others beside it, and as many tokens as a row asks for."""
    monkeypatch.setenv("TEACHER_KEY", engine.server._api_key)
    teacher = Teacher(engine.server.url, api_key_variable="TEACHER_KEY")
    tokenizer = AutoTokenizer.from_pretrained(policies.folder)
    with pytest.raises(NeverWorks, match="does not tell the texts of tokens"):
        await teacher.check_vocabulary(tokenizer, 20)  # it was started without a tokenizer
    rows = [[(7 * it + place) % VOCAB_SIZE for place in range(60)] for it in range(4)]
    for first, top_k in itertools.product((1, 30, 59), (0, 20)):
        told = await asyncio.gather(*(teacher.tell(row, first, top_k) for row in rows))
        for row, places in zip(rows, told, strict=True):
            expected = policies.logprobs(engine.version, row)[first:]
            assert len(places) == len(expected)
            for token, place, whole in zip(row[first:], places, expected, strict=True):
                assert place.logprob == pytest.approx(whole[token].item(), abs=TOLERANCE)
                values = whole.topk(top_k).values.tolist()
                assert sorted((value for _, value in place.top), reverse=True) == pytest.approx(
                    values, abs=TOLERANCE
                )
                of_tokens = [whole[it].item() for it, _ in place.top]
                assert [value for _, value in place.top] == pytest.approx(of_tokens, abs=TOLERANCE)
