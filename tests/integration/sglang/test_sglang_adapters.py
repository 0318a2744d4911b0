"""Adapters beside the model that a real server has: loaded, shown, named by requests, forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
import torch
from integration.sglang.adapter_policies import LORA, AdapterPolicies
from integration.sglang.policies import Generating
from integration.sglang.running_answers import NUM_TRIES
from local_engines import at_hand

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ModelError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

LONG = GenerationConfig(max_new_tokens=900)
SHORT = GenerationConfig(max_new_tokens=20)
PROMPTS = [[3 + i % 7, 11 + i] for i in range(8)]
Until = Callable[[Callable[[], bool]], Awaitable[None]]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterPolicies:
    return AdapterPolicies(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    rollout_config: RolloutConfig,
    sglang_config: SGLangConfig,
    adapters: AdapterPolicies,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServerEngine]:
    config = replace(
        rollout_config,
        path=str(adapters.folder),
        lora=LORA,
        sglang=sglang_config,
    )
    logs = tmp_path_factory.mktemp("adapter_logs")
    engine = ServerEngine(SGLangEngine(config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


async def versions_loaded(engine: ServerEngine) -> set[int]:
    names = await engine.server.client.loaded_adapters()
    return {int(name.split("-")[1]) for name in names if name.startswith("policy-")}


async def publish(engine: ServerEngine, adapters: AdapterPolicies) -> int:
    version = adapters.add()
    await engine.update_weights(version, adapters.source(version))
    return version


async def check_now(engine: ServerEngine, adapters: AdapterPolicies, version: int) -> None:
    answers = await asyncio.gather(*(engine.generate(prompt, SHORT) for prompt in PROMPTS))
    assert all(set(answer.versions) == {version} for answer in answers)
    adapters.check_all(PROMPTS, answers)


async def test_adapters_replace_each_other_in_the_middle_of_answers(
    engine: ServerEngine, adapters: AdapterPolicies, generating: Generating
) -> None:
    """The first time there was none: version 0 is the model alone."""

    def start() -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]

    num_replaced = 0
    for _ in range(NUM_TRIES):  # on a busy machine answers may end before their adapter goes
        old, before = engine.version, engine.stats()["update_bytes"]
        tasks = await generating(start)
        new = await publish(engine, adapters)
        assert engine.version == new
        answers = await asyncio.gather(*tasks)
        assert all(set(answer.versions) <= {old, new} for answer in answers)
        assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)
        adapters.check_all(PROMPTS, answers)
        assert await versions_loaded(engine) == {old, new} - {0}
        num_bytes = sum(values.nbytes for _, values in adapters.named_tensors(new))
        assert 0 < engine.stats()["update_bytes"] - before < 2 * num_bytes
        num_replaced += all(set(answer.versions) == {old, new} for answer in answers)
        if num_replaced == 2:
            return
    raise AssertionError(f"in {NUM_TRIES} updates answers went on {num_replaced} times")


async def test_an_adapter_is_forgotten_although_requests_of_it_were_aborted_in_the_queue(
    engine: ServerEngine, adapters: AdapterPolicies
) -> None:
    """SGLang by itself would wait for them for ever."""
    first = await publish(engine, adapters)
    client = engine.server.client
    assert client.adapter
    body = {"input_ids": [3, 4], "lora_path": client.adapter.name}
    body |= {"sampling_params": {"max_new_tokens": LONG.max_new_tokens}}
    requests = [
        asyncio.create_task(client.request("POST", "/generate", body, None)) for _ in range(100)
    ]
    num_waiting = 0
    while not num_waiting:
        assert not all(request.done() for request in requests)
        answer = await client.request("GET", "/v1/loads?include=core", None, 30.0)
        num_waiting = sum(load["num_waiting_reqs"] for load in answer["loads"])
    await client.abort_all()
    await asyncio.gather(*requests)
    second, third = await publish(engine, adapters), await publish(engine, adapters)
    assert await versions_loaded(engine) == {second, third}
    assert first not in await versions_loaded(engine)


async def test_an_adapter_that_changes_nothing_is_noticed(
    engine: ServerEngine, adapters: AdapterPolicies
) -> None:
    """As one that a server ignores; what was served is served on."""
    old = await publish(engine, adapters)
    new = adapters.add()
    tensors = adapters.named_tensors(new)
    zeros = [(n, torch.zeros_like(v) if n.endswith("lora_B") else v) for n, v in tensors]
    of_one_layer_less = [(name, v) for name, v in tensors if ".layers.1." not in name]
    for wrong in (zeros, of_one_layer_less):
        with pytest.raises(ModelError, match=r"does not compute with adapter .*publish_merged"):
            await engine.update_weights(new, at_hand(wrong))
        assert engine.version == old
        await check_now(engine, adapters, old)
    await check_now(engine, adapters, await publish(engine, adapters))
