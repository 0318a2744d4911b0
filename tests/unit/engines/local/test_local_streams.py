"""Tokens that are told while the rest of their answer is sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from itertools import chain
from typing import Any

import local_engines
import pytest
from local_engines import ENDLESS, MAX_CONTEXT
from random_models import random_model

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.base import RequestOptions
from areal_sc.engines.local.engine import LocalEngine
from areal_sc.errors import WorkerError


def running() -> AbstractAsyncContextManager[LocalEngine]:
    return local_engines.running(random_model(max_position_embeddings=MAX_CONTEXT))


async def is_idle(engine: LocalEngine) -> bool:
    """Whether every place is free once the thread has done what it was told."""
    await engine.resume()
    return engine.stats()["running_requests"] == engine.stats()["waiting_requests"] == 0


async def test_every_token_is_told_once_in_the_task_that_waits() -> None:
    """Beside others, in rows that move when others end, and behind a stop string."""

    async def ask(engine: LocalEngine, number: int) -> None:
        told: list[list[int]] = []
        task = asyncio.current_task()

        def tell(token_ids: Sequence[int]) -> None:
            assert asyncio.current_task() is task
            told.append(list(token_ids))

        stop = ["7,"] if number % 2 else []
        sampling = GenerationConfig(max_new_tokens=1 + 5 * number, stop=stop)
        on_tokens = tell if number % 3 else None
        answer = await engine.generate([number + 1, 3], sampling, on_tokens=on_tokens)
        assert list(chain.from_iterable(told)) == (answer.token_ids if number % 3 else [])
        assert all(told)

    async with running() as engine:
        await asyncio.gather(*(ask(engine, number) for number in range(12)))
        assert await is_idle(engine)
    assert engine._generator.table.take_streamed() == []


async def test_tokens_come_before_the_answer_ends_and_across_updates() -> None:
    told: list[int] = []
    wanted, has_come = 3, asyncio.Event()

    def tell(token_ids: Sequence[int]) -> None:
        told.extend(token_ids)
        if len(told) >= wanted:
            has_come.set()

    new: Any = list(random_model(seed=1, max_position_embeddings=MAX_CONTEXT).named_parameters())
    async with running() as engine:
        answering = asyncio.create_task(
            engine.generate([1, 2], ENDLESS, RequestOptions(prefix_group="g"), on_tokens=tell)
        )
        for version in (1, 2):
            await has_come.wait()
            await engine.update_weights(version, lambda: asyncio.sleep(0, new))
            has_come.clear()
            wanted = len(told) + 3
        await has_come.wait()
        await engine.call(lambda: engine._generator.table.max_length.fill(0))  # it ends
        answer = await answering
    assert set(answer.versions) == {0, 1, 2}
    assert told == answer.token_ids


@pytest.mark.parametrize("number", [1, 5])
async def test_what_a_callback_raises_ends_the_answer(number: int) -> None:
    """At its first token, or later; also at the last one of all."""
    told: list[int] = []

    def tell(token_ids: Sequence[int]) -> None:
        told.extend(token_ids)
        if len(told) >= number:
            raise LookupError("enough")

    async with running() as engine:
        other = asyncio.create_task(engine.generate([3], GenerationConfig(max_new_tokens=50)))
        for sampling in (ENDLESS, GenerationConfig(max_new_tokens=number)):
            with pytest.raises(LookupError, match="enough"):
                await engine.generate([1, 2], sampling, on_tokens=tell)
            num_told = len(told)
            assert num_told >= number
            told.clear()
        assert len((await other).token_ids) == 50
        assert await is_idle(engine)
    assert told == []


async def test_a_callback_may_cancel_its_task() -> None:
    told: list[int] = []

    def tell(token_ids: Sequence[int]) -> None:
        told.extend(token_ids)
        if len(told) >= 3:
            answering.cancel()

    async with running() as engine:
        answering = asyncio.create_task(engine.generate([1, 2], ENDLESS, on_tokens=tell))
        await asyncio.wait([answering])
        assert answering.cancelled()
        assert await is_idle(engine)
    assert 3 <= len(told) < 4000


async def test_the_engine_s_failure_is_told_behind_the_tokens() -> None:
    told: list[int] = []
    has_come = asyncio.Event()

    def tell(token_ids: Sequence[int]) -> None:
        told.extend(token_ids)
        has_come.set()

    async with running() as engine:
        answering = asyncio.create_task(engine.generate([1, 2], ENDLESS, on_tokens=tell))
        await has_come.wait()
        await engine.close()
        with pytest.raises(WorkerError, match="closed"):
            await answering
    assert told
