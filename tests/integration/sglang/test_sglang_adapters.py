"""Adapters beside the model that a real server has: loaded, shown, named by requests, forgotten."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
import pytest_asyncio
from integration.sglang.adapter_policies import LORA, AdapterPolicies
from integration.sglang.policies import at_hand
from integration.sglang.running_answers import generating_on

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.engines.training.adapters.adapter_probe import PROBE_NAME
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
        sglang=replace(sglang_config, num_servers=1),
    )
    logs = tmp_path_factory.mktemp("adapter_logs")
    engine = ServerEngine(SGLangEngine(config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


async def loaded(engine: ServerEngine) -> set[str]:
    return {n for n in await engine.replicas[0].client.loaded_adapters() if n.startswith("policy-")}


async def test_adapters_replace_each_other_in_the_middle_of_answers(
    engine: ServerEngine, adapters: AdapterPolicies
) -> None:
    client = engine.replicas[0].client

    async def num_running() -> int:
        answer = await client.request("GET", "/v1/loads?include=core", None, 30.0)
        return sum(load["num_running_reqs"] for load in answer["loads"])

    def start() -> list[asyncio.Task[Completion]]:
        return [asyncio.create_task(engine.generate(prompt, LONG)) for prompt in PROMPTS]

    for _ in range(4):
        old, new = engine.version, adapters.add()
        tasks = await generating_on(num_running)(start)
        await engine.update_weights(new, adapters.source(new))
        assert engine.version == new
        answers = await asyncio.gather(*tasks)
        assert all(set(answer.versions) == {old, new} for answer in answers)
        adapters.check_all(PROMPTS, answers)
        assert {name.split("-")[1] for name in await loaded(engine)} <= {str(old), str(new)}
