"""Servers that give their memory up in the middle of answers, and get it back with new weights.

SGLang for CPUs has no memory saver: it takes the same calls, and asserts the same of its requests,
but keeps the memory.
"""

from __future__ import annotations

import asyncio

import pytest
from integration.sglang.policies import Generating, Policies
from local_engines import at_hand

from areal_sc.config.schema import GenerationConfig
from areal_sc.engines.servers.engine import ServerEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = GenerationConfig(max_new_tokens=900)
PROMPTS = [[3 + i % 7, 11 + i] for i in range(8)]


@pytest.mark.parametrize("is_paused", [False, True])
async def test_answers_go_on_with_the_next_weights(
    engine: ServerEngine, policies: Policies, generating: Generating, is_paused: bool
) -> None:
    old, new = engine.version, policies.add()
    tasks = await generating(
        lambda: [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]
    )
    if is_paused:
        await engine.pause()
    await engine.sleep()
    sampled = engine.stats()["generated_tokens"]
    assert engine.stats()["occupied_places"] == 0
    await engine.resume()  # which is not enough: there are no weights
    await engine.sleep()  # once more, with nothing to give up
    assert not engine.server.places.is_open
    assert engine.stats()["generated_tokens"] == sampled
    await engine.update_weights(new, at_hand(policies.named_tensors(new)))
    answers = await asyncio.gather(*tasks)
    # SGLang answers a request that a pause has held, and that is aborted then, without its tokens
    known = {new} if is_paused else {old, new}
    assert all(known <= set(answer.versions) <= {old, new} for answer in answers)
    assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)
    policies.check_all(PROMPTS, answers)
