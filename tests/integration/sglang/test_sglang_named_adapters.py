"""Adapters that requests name, on a real server: several at once, more than it has room for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from integration.sglang.policies import TOLERANCE, Policies
from several_adapters import Merged, add_adapter, check_answer, of_the_model

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.base import RequestOptions
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, ModelError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PLACES = 3
SAMPLED = GenerationConfig(max_new_tokens=20, temperature=0.7)
PROMPT = [3, 5, 7, 11]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Policies:
    return Policies(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def merged(model: Policies, tmp_path_factory: pytest.TempPathFactory) -> list[Merged]:
    """Five of several ranks, and none."""
    folder = tmp_path_factory.mktemp("adapters")
    base = model._models[0]
    found = [
        add_adapter(base, folder / str(seed), seed=seed, rank=rank, alpha=8.0, size=0.08)
        for seed, rank in enumerate((4, 1, 2, 4, 3))
    ]
    return [*found, of_the_model(base)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    rollout_config: RolloutConfig,
    sglang_config: SGLangConfig,
    model: Policies,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[ServerEngine]:
    lora = LoraConfig(rank=4, places=PLACES)
    config = replace(rollout_config, path=str(model.folder), lora=lora, sglang=sglang_config)
    logs = tmp_path_factory.mktemp("logs")
    engine = ServerEngine(SGLangEngine(config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


async def test_more_adapters_than_there_is_room_for(
    engine: ServerEngine, merged: list[Merged]
) -> None:
    for _ in range(2):
        answers = await asyncio.gather(
            *(
                engine.generate(
                    PROMPT,
                    SAMPLED,
                    RequestOptions(adapter=it.folder, prompt_logprobs=True, top_k_logprobs=3),
                )
                for it in merged
                for _ in range(2)
            )
        )
        for number, answer in enumerate(answers):
            assert len(answer.token_ids) == SAMPLED.max_new_tokens
            it = merged[number // 2]
            check_answer(it, PROMPT, answer, 0.7, tolerance=TOLERANCE, num_top=3)
    names = await engine.server.client.loaded_adapters()
    assert sum(name.startswith("adapter-") for name in names) == PLACES


async def test_what_cannot_be_served_is_refused_by_name(
    engine: ServerEngine, merged: list[Merged], model: Policies, tmp_path: Path
) -> None:
    large = add_adapter(model._models[0], tmp_path / "large", seed=7, rank=5)
    with pytest.raises(ModelError, match=r"large: expected a rank up to actor.lora.rank=4, got 5"):
        await engine.generate(PROMPT, SAMPLED, RequestOptions(adapter=large.folder))
    with pytest.raises(ModelError, match=r"cannot read adapter_config\.json"):
        await engine.generate(PROMPT, SAMPLED, RequestOptions(adapter=str(tmp_path / "none")))
    mad = add_adapter(model._models[0], tmp_path / "mad", seed=7, rank=4, size=1e18)
    with pytest.raises(ModelError, match=r"adapter .*mad: .* not finite"):
        await engine.generate(PROMPT, SAMPLED, RequestOptions(adapter=mad.folder))
    with pytest.raises(ConfigError, match="expected none with on_tokens"):
        await engine.generate(
            PROMPT, SAMPLED, RequestOptions(prompt_logprobs=True), on_tokens=lambda _: None
        )
    answer = await engine.generate(
        PROMPT, SAMPLED, RequestOptions(adapter=merged[0].folder, prompt_logprobs=True)
    )
    check_answer(merged[0], PROMPT, answer, 0.7, tolerance=TOLERANCE)


async def test_prompts_of_one_token_and_in_pieces(
    engine: ServerEngine, merged: list[Merged]
) -> None:
    """Where strings end an answer it is asked for in pieces, and the first one tells the prompt."""
    long = GenerationConfig(max_new_tokens=150, stop=["never"])
    for prompt, sampling in (([9], SAMPLED), (PROMPT, long)):
        answer = await engine.generate(
            prompt,
            sampling,
            RequestOptions(adapter=merged[1].folder, prompt_logprobs=True, top_k_logprobs=2),
        )
        check_answer(
            merged[1], prompt, answer, sampling.temperature, tolerance=TOLERANCE, num_top=2
        )
