"""Adapters beside the model that a real vLLM server has; the tests are SGLang's."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import pytest_asyncio
from integration.sglang.adapter_policies import LORA, AdapterPolicies
from integration.sglang.test_sglang_adapters import (  # noqa: F401
    test_adapters_replace_each_other_in_the_middle_of_answers,
    test_an_adapter_that_changes_nothing_is_noticed,
)

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.vllm.handle import VLLMEngine

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> AdapterPolicies:
    return AdapterPolicies(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    rollout_config: RolloutConfig,
    adapters: AdapterPolicies,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServerEngine]:
    config = replace(rollout_config, path=str(adapters.folder), lora=LORA)
    logs = tmp_path_factory.mktemp("adapter_logs")
    engine = ServerEngine(VLLMEngine(config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()
