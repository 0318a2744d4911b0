"""The engine as a rollout worker sees it: coroutines, cancellation, failures."""

from __future__ import annotations

import asyncio
import copy
import functools
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import NumberTokenizer
from local_engines import ENDLESS, MAX_CONTEXT, at_hand, running
from random_models import random_model, reference_logprobs
from waiting import until

from areal_sc.config.schema import (
    GenerationConfig,
    OnWeightUpdate,
    RolloutConfig,
    WeightUpdateConfig,
)
from areal_sc.engines.base import RequestOptions
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.errors import ConfigError, ModelError, WorkerError, WorkflowError
from areal_sc.weights.group import (
    WeightBroadcaster,
    layout_of,
    split_into_buckets,
)

TIMEOUT_S = 60.0


long_model = functools.partial(random_model, max_position_embeddings=MAX_CONTEXT)
"""Models with room for completions that outlast every step of a test."""


async def end_running(engine: LocalEngine) -> None:
    """Each running request ends with its next token."""
    await engine.call(lambda: engine._generator.table.max_length.fill(0))


def tokens(number: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=number)


def greedy(number: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=number, temperature=0)


async def test_more_requests_than_slots_and_per_request_settings() -> None:
    model = long_model()
    settings = [
        GenerationConfig(max_new_tokens=1 + i, temperature=0.5 * (i % 4)) for i in range(12)
    ]
    async with running(model) as engine:
        completions = await asyncio.gather(
            *(engine.generate([i + 1] * (i + 1), setting) for i, setting in enumerate(settings))
        )
        stats = engine.stats()
    for i, (completion, setting) in enumerate(zip(completions, settings, strict=True)):
        assert len(completion.token_ids) == setting.max_new_tokens
        assert completion.finish_reason == "length"
        assert set(completion.versions) == {0}
        assert {type(it) for it in (*completion.token_ids, *completion.versions)} == {int}
        assert {type(logprob) for logprob in completion.logprobs} == {float}
        expected = reference_logprobs(
            {0: model}, [i + 1] * (i + 1), completion, setting.temperature
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)
    assert stats["generated_tokens"] == sum(range(1, 13))
    assert stats["finished_requests"] == 12
    assert stats["running_requests"] == stats["waiting_requests"] == 0
    assert stats["busy_s"] > 0


async def test_finish_reasons() -> None:
    model = long_model()
    async with running(model, max_context_tokens=20) as engine:
        whole = await engine.generate([1, 2, 3], tokens(100))
        assert (len(whole.token_ids), whole.finish_reason) == (17, "context")
        exact = await engine.generate([1, 2, 3], tokens(17))
        assert (len(exact.token_ids), exact.finish_reason) == (17, "length")
        greedy = GenerationConfig(max_new_tokens=12, temperature=0.0)
        free = await engine.generate([1, 2, 3], greedy)
        stop = free.token_ids[4]
        first = free.token_ids.index(stop)
        greedy.stop_token_ids = [39, stop]
        stopped = await engine.generate([1, 2, 3], greedy)
        assert stopped.token_ids == free.token_ids[: first + 1]
        assert stopped.finish_reason == "stop"
        text = engine.tokenizer.decode(stopped.token_ids)
        by_text = GenerationConfig(max_new_tokens=12, temperature=0.0, stop=["no", text[1:-1]])
        ended = await engine.generate([1, 2, 3], by_text)
        assert (ended.token_ids, ended.finish_reason) == (stopped.token_ids, "stop")
    async with running(model, eos_token_id=stop) as engine:
        greedy.stop_token_ids = []
        ended = await engine.generate([1, 2, 3], greedy)
        assert (ended.token_ids, ended.finish_reason) == (stopped.token_ids, "stop")
    model.generation_config.eos_token_id = [38, stop]
    async with running(model) as engine:
        ended = await engine.generate([1, 2, 3], greedy)
        assert (ended.token_ids, ended.finish_reason) == (stopped.token_ids, "stop")


async def test_bad_requests_are_refused_and_the_engine_goes_on() -> None:
    async with running(long_model(), max_context_tokens=20) as engine:
        with pytest.raises(WorkflowError, match=r"prompt has 20 tokens.*context of 20 tokens"):
            await engine.generate([1] * 20, tokens(1))
        with pytest.raises(WorkflowError, match="empty"):
            await engine.generate([], tokens(1))
        with pytest.raises(WorkflowError, match=r"token ids 2\.\.40, the model has 0\.\.39"):
            await engine.generate([2, 40], tokens(1))
        for name, value in (
            ("temperature", -0.1),
            ("temperature", float("nan")),
            ("top_p", 0.0),
            ("top_p", 1.1),
            ("top_k", -1),
            ("max_new_tokens", 0),
        ):
            with pytest.raises(ConfigError, match=rf"generation\.{name} must be"):
                await engine.generate([1], GenerationConfig(**{name: value}))
        assert len((await engine.generate([1] * 19, tokens(5))).token_ids) == 1


async def test_a_group_prefills_its_prompt_once() -> None:
    prompt = list(range(20))
    async with running(long_model(), max_running_sequences=8) as engine:
        completions = await asyncio.gather(
            *(
                engine.generate(prompt, tokens(6), RequestOptions(prefix_group="g"))
                for _ in range(8)
            )
        )
        assert engine.stats()["prefill_tokens"] == 20
        assert engine.stats()["shared_prompt_tokens"] == 7 * 19
        assert len({tuple(completion.token_ids) for completion in completions}) > 1
    async with running(long_model(), max_running_sequences=3) as engine:  # in several waves
        lengths = [20, 30, 40, 5, 6, 7, 8, 9]
        await asyncio.gather(
            *(engine.generate(prompt, tokens(n), RequestOptions(prefix_group="g")) for n in lengths)
        )
        assert engine.stats()["prefill_tokens"] == 20


async def test_weights_change_in_the_middle_of_completions() -> None:
    model = long_model()
    models = {0: copy.deepcopy(model), 3: long_model(seed=1)}
    async with running(model, max_prefill_tokens=7) as engine:
        prompts = [[i + 1, i + 2] for i in range(4)]
        tasks = [
            asyncio.create_task(engine.generate(prompt, ENDLESS, RequestOptions(prefix_group="g")))
            for prompt in prompts
        ]
        await until(lambda: engine.stats()["generated_tokens"] >= 40)
        new = [(name, p.detach().flatten()) for name, p in models[3].named_parameters()]
        await engine.update_weights(3, at_hand(new))
        assert engine.version == 3
        after = engine.stats()["generated_tokens"]
        await until(lambda: engine.stats()["generated_tokens"] >= after + 40)
        await end_running(engine)
        completions = await asyncio.gather(*tasks)
        assert engine.stats()["recomputed_tokens"] > 0
    assert [set(completion.versions) for completion in completions] == [{0, 3}] * 4
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference_logprobs(models, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


async def test_answers_sleep_and_go_on_under_the_next_weights() -> None:
    model = long_model()
    models = {0: copy.deepcopy(model), 3: long_model(seed=1)}
    async with running(model, max_prefill_tokens=7) as engine:
        prompts = [[i + 1, i + 2] for i in range(4)]
        tasks = [
            asyncio.create_task(engine.generate(prompt, ENDLESS, RequestOptions(prefix_group="g")))
            for prompt in prompts
        ]
        await until(lambda: engine.stats()["generated_tokens"] >= 20)
        await engine.sleep()
        await engine.sleep()  # a repeat changes nothing
        before = engine.stats()
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
        late = asyncio.create_task(
            engine.generate([9], tokens(3), RequestOptions(prefix_group="g"))
        )
        await engine.resume()  # which is not enough: there are no weights
        assert engine.stats()["steps"] == before["steps"]
        await engine.update_weights(3, at_hand(models[3].named_parameters()))
        await until(lambda: engine.stats()["generated_tokens"] >= before["generated_tokens"] + 40)
        await end_running(engine)
        completions = await asyncio.gather(*tasks)
        assert (await late).versions == [3] * 3
    for prompt, completion in zip(prompts, completions, strict=True):
        assert set(completion.versions) == {0, 3}
        expected = reference_logprobs(models, prompt, completion, 1.0)
        np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


async def test_a_refused_update_leaves_a_sleeping_engine_asleep() -> None:
    model, given = long_model(), long_model(seed=1)
    async with running(model) as engine:
        answer = asyncio.create_task(engine.generate([1], tokens(3)))
        await engine.sleep()
        with pytest.raises(ModelError, match="missing"):
            await engine.update_weights(1, at_hand([("model.norm.weight", torch.zeros(32))]))
        assert engine.stats()["steps"] == 0
        await engine.sleep()
        assert sum(p.untyped_storage().nbytes() for p in model.parameters()) == 0
        await engine.update_weights(1, at_hand(given.named_parameters()))
        assert set((await answer).versions) == {1}
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, given.state_dict()[name])


async def test_cancelling_a_task_frees_its_slot() -> None:
    async with running(long_model(), max_running_sequences=1) as engine:
        long = asyncio.create_task(engine.generate([1], ENDLESS))
        waiting = asyncio.create_task(engine.generate([2], ENDLESS))
        short = asyncio.create_task(engine.generate([3], tokens(2)))
        await until(lambda: engine.stats()["generated_tokens"] > 0)
        await engine.pause()  # so that it cannot finish first
        long.cancel()
        waiting.cancel()
        for task in (long, waiting):
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: engine.stats()["running_requests"] == 0)
        assert engine.stats()["waiting_requests"] == 1
        assert engine.stats()["cancelled_requests"] == 2
        await engine.resume()
        assert len((await short).token_ids) == 2


async def test_pause_stops_generation_and_updates_still_apply() -> None:
    model = long_model()
    async with running(model) as engine:
        task = asyncio.create_task(engine.generate([1], ENDLESS, RequestOptions(prefix_group="g")))
        await until(lambda: engine.stats()["generated_tokens"] > 0)
        await engine.pause()
        before = engine.stats()["generated_tokens"]
        await engine.update_weights(9, at_hand(long_model(seed=2).named_parameters()))
        assert engine.stats()["generated_tokens"] == before
        assert not task.done()
        await engine.resume()
        await until(lambda: engine.stats()["generated_tokens"] > before)
        await end_running(engine)
        completion = await task
        assert set(completion.versions) == {0, 9}


async def test_the_same_seed_gives_the_same_completions() -> None:
    async def sample(seed: int) -> list[list[int]]:
        async with running(long_model(), seed=seed) as engine:
            completions = await asyncio.gather(
                *(engine.generate([i, i + 1], tokens(20)) for i in range(10))
            )
        return [completion.token_ids for completion in completions]

    first = await sample(1)
    assert first == await sample(1)
    assert first != await sample(2)


async def test_a_failure_reaches_pending_and_later_calls() -> None:
    model = long_model()
    async with running(model) as engine:
        tasks = [asyncio.create_task(engine.generate([i], ENDLESS)) for i in range(6)]
        await until(lambda: engine.stats()["generated_tokens"] > 0)
        broken = [(n, torch.full_like(p, torch.nan)) for n, p in model.named_parameters()]
        await engine.update_weights(1, at_hand(broken))
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, WorkerError)
            assert "policy version 1" in str(outcome)
            assert isinstance(outcome.__cause__, ModelError)
        for call in later_calls(engine):
            with pytest.raises(WorkerError, match="not finite"):
                await call()


async def test_a_step_that_does_not_end_fails_the_engine(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    end = threading.Event()
    async with running(long_model(), step_timeout_s=1.0) as engine:
        monkeypatch.setattr(engine._generator, "step", lambda: end.wait(60) and None)
        with pytest.raises(WorkerError, match="not ended for 1 s"):
            await engine.generate([1], ENDLESS)
        for call in later_calls(engine):
            with pytest.raises(WorkerError, match="not ended for 1 s"):
                await call()
        end.set()
    assert "most recent call first" in capfd.readouterr().err


def later_calls(engine: LocalEngine) -> list[Callable[[], Awaitable[Any]]]:
    return [
        lambda: engine.generate([1], tokens(1)),
        lambda: engine.update_weights(2, at_hand([])),
        engine.pause,
        engine.resume,
    ]


async def test_closing_ends_pending_and_later_calls() -> None:
    async with running(long_model()) as engine:
        task = asyncio.create_task(engine.generate([1], ENDLESS))
        await until(lambda: engine.stats()["generated_tokens"] > 0)
        await engine.close()
        with pytest.raises(WorkerError, match="closed"):
            await task
        for call in later_calls(engine):
            with pytest.raises(WorkerError, match="closed"):
                await call()
        await engine.close()


async def test_running_requests_may_finish_before_an_update() -> None:
    new = at_hand(long_model(seed=1).named_parameters())
    finish = OnWeightUpdate.finish_running
    async with running(long_model(), on_weight_update=finish) as engine:
        first = [asyncio.create_task(engine.generate([i], ENDLESS)) for i in (1, 2)]
        await until(lambda: engine.stats()["generated_tokens"] > 4)
        update = asyncio.create_task(engine.update_weights(1, new))
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.generate([3], tokens(5)))
        await until(lambda: engine.stats()["waiting_requests"] == 1)
        began_s, before = time.perf_counter(), engine.stats()["generated_tokens"]
        await until(lambda: engine.stats()["generated_tokens"] > before + 20)
        held_s = time.perf_counter() - began_s
        assert engine.version == 0
        await end_running(engine)
        await update
        assert (await late).versions == [1] * 5
        for answer in await asyncio.gather(*first):
            assert set(answer.versions) == {0}
        stats = engine.stats()
        assert stats["update_drain_s"] >= held_s > 0
        assert stats["update_load_s"] == stats["update_stall_s"] > 0


async def test_weights_from_a_folder(tmp_path: Path) -> None:
    new = long_model(seed=1)
    new.save_pretrained(tmp_path / "new")
    async with running(copy.deepcopy(new)) as engine:
        expected = await engine.generate([1, 2], greedy(20))
    async with running(long_model()) as engine:
        await engine.update_weights_from_disk(4, tmp_path / "new")
        found = await engine.generate([1, 2], greedy(20))
        assert found.token_ids == expected.token_ids
        assert set(found.versions) == {4}
        cut = tmp_path / "new" / "model.safetensors"
        cut.write_bytes(cut.read_bytes()[:-10])
        with pytest.raises(ModelError, match="truncated or damaged"):
            await engine.update_weights_from_disk(5, tmp_path / "new")
        assert engine.version == 4


async def test_weights_from_a_broadcast() -> None:
    """And, once the group is broken, from what it is given instead."""
    new = long_model(seed=1)
    tensors = [(name, p.detach()) for name, p in new.named_parameters()]
    buckets = list(split_into_buckets(tensors, 4000))
    layouts = [layout_of(bucket) for bucket in buckets]
    given_up = asyncio.Event()

    async def give_up() -> None:
        given_up.set()

    root = WeightBroadcaster("group", "127.0.0.1", "gloo", TIMEOUT_S)
    update = WeightUpdateConfig(step_timeout_s=TIMEOUT_S)
    async with running(copy.deepcopy(new)) as engine:
        expected = await engine.generate([1, 2], greedy(20))
    async with running(long_model(), weight_update=update) as engine:
        await asyncio.gather(
            asyncio.to_thread(root.meet, 2), engine.join_group(root.describe(2), 1)
        )
        assert engine.has_whole_group("group")

        def send() -> None:
            for bucket in buckets:
                root.broadcast(bucket, threading.Event())

        again = at_hand([])
        await asyncio.gather(
            asyncio.to_thread(send),
            engine.update_weights_from_group(1, "group", layouts, again=again, give_up=give_up),
        )
        found = await engine.generate([1, 2], greedy(20))
        assert found.token_ids == expected.token_ids
        assert set(found.versions) == {1}
        assert not given_up.is_set()
        root.close()
        await engine.update_weights_from_group(
            2, "group", layouts, again=at_hand(tensors), give_up=give_up
        )
        assert engine.version == 2
        assert given_up.is_set()
        assert not engine.has_whole_group("group")


async def test_an_engine_that_was_not_started_says_so() -> None:
    config = RolloutConfig(path="", max_context_tokens=64, seed=0)
    engine = LocalEngine(config, (long_model(), NumberTokenizer()))
    with pytest.raises(WorkerError, match="not been started"):
        await engine.generate([1], tokens(1))
    await engine.close()
