"""A pretrained Llama on a real server: its answers, and those of its next weights or adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from integration.sglang.adapter_policies import LORA, AdapterPolicies
from integration.sglang.policies import Answers, Generating, Policies
from local_engines import at_hand

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import Device, Dtype, GenerationConfig, RolloutConfig
from areal_sc.config.server_settings import SGLangConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ModelError

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

QUESTIONS = ("Write a story about the sea.", "Why is the sky blue?")
CHANGE = 0.1
"""Versions that differ so little still answer in sentences."""


@pytest.fixture(scope="module", params=[Policies, AdapterPolicies], ids=["weights", "adapter"])
def versions(real_model: Path, request: pytest.FixtureRequest) -> Policies:
    made: Policies = request.param(real_model, change=CHANGE)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    sglang_config: SGLangConfig, versions: Policies, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[ServerEngine]:
    config = RolloutConfig(
        path=str(versions.folder),
        dtype=Dtype.float32,
        device=Device.cpu,
        max_running_sequences=16,
        max_context_tokens=256,
        seed=0,
        lora=LORA if isinstance(versions, AdapterPolicies) else LoraConfig(),
        sglang=sglang_config,
    )
    logs = tmp_path_factory.mktemp("real_model_logs")
    engine = ServerEngine(SGLangEngine(config), log_folder=logs, name="rollout-0")
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def prompts(engine: ServerEngine) -> list[list[int]]:
    return [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]


@pytest.mark.parametrize("versions", [Policies], ids=["weights"], indirect=True)
async def test_logprobs_of_both_temperatures_are_those_of_transformers(
    engine: ServerEngine, versions: Policies, prompts: list[list[int]]
) -> None:
    asked = [(prompt, temperature) for prompt in prompts for temperature in (1.0, 0.7)]
    answers = await asyncio.gather(
        *(
            engine.generate(prompt, GenerationConfig(max_new_tokens=12, temperature=temperature))
            for prompt, temperature in asked
        )
    )
    for (prompt, temperature), answer in zip(asked, answers, strict=True):
        versions.check(prompt, answer, temperature)
        assert set(answer.versions) == {engine.version}


async def test_a_new_version_goes_on_with_the_answers_of_the_old_one(
    engine: ServerEngine, versions: Policies, prompts: list[list[int]], generating: Generating
) -> None:
    """The server is paused for it, so that the answers are not at their end before."""
    greedy = GenerationConfig(max_new_tokens=40, temperature=0.0)

    def start() -> Answers:
        return [asyncio.create_task(engine.generate(prompt, greedy)) for prompt in prompts]

    old, new = engine.version, versions.add()
    tasks = await generating(start)
    await engine.pause()
    await engine.update_weights(new, versions.source(new))
    await engine.resume()
    answers = await asyncio.gather(*tasks)
    assert all(set(answer.versions) == {old, new} for answer in answers)
    versions.check_all(prompts, answers)
    later = await engine.generate(prompts[0], GenerationConfig(max_new_tokens=8))
    assert set(later.versions) == {new}
    versions.check(prompts[0], later)


@pytest.mark.parametrize("versions", [AdapterPolicies], ids=["adapter"], indirect=True)
@pytest.mark.parametrize(
    "scale",
    [
        pytest.param(0.0, id="ignored"),
        pytest.param(0.95, id="of-an-earlier-step"),  # an adapter grows
        pytest.param(2.0, id="twice-its-scale"),
    ],
)
async def test_an_adapter_that_is_not_the_published_one_is_refused(
    engine: ServerEngine, versions: Policies, scale: float
) -> None:
    published = versions.named_tensors(versions.add())
    wrong = [(n, scale * v if n.endswith("lora_B") else v) for n, v in published]
    served = engine.version
    with pytest.raises(ModelError, match="does not compute with adapter"):
        await engine.update_weights(versions.newest, at_hand(wrong))
    assert engine.version == served
