"""A real server tells which experts each token went through, also across new weights."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from integration.sglang.policies import SIZES, Policies
from transformers import Qwen3MoeConfig

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.base import Completion
from areal_sc.engines.routers import Routers
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

WITHOUT_PINNING = """
import types

try:
    import torch
except ImportError:
    pass
else:
    runtime = types.SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0
    )
    torch.cuda.cudart = lambda: runtime
"""
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def share_of_others(policies: Policies, prompt: list[int], answer: Completion) -> float:
    """Of the experts that the model of each token's version does not choose.

    Those of a token are told by the version of the token behind it, which it predicts.
    """
    token_ids = torch.tensor([[*prompt, *answer.token_ids]])
    assert answer.routes is not None
    assert answer.routes.shape == (token_ids.numel(), 2, 2)
    assert answer.routes.dtype == np.uint8
    assert not answer.routes[-1].any()
    of_version = {}
    for version in set(answer.versions):
        model = copy.deepcopy(policies._models[version])
        routers = Routers(model)
        with torch.no_grad():
            model(token_ids, use_cache=False)
        of_version[version] = routers.routes().numpy()
    versions = [answer.versions[0]] * (len(prompt) - 1) + answer.versions
    expected = np.stack([of_version[version][place] for place, version in enumerate(versions)])
    found = answer.routes[:-1]
    return float((found[..., None] != expected[..., None, :]).all(-1).mean())


@pytest.fixture
def without_pinning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang pins its table of experts for a GPU, even where there is none."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_PINNING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("without_pinning")
async def test_answers_tell_their_experts(rollout_config: RolloutConfig, tmp_path: Path) -> None:
    """Of prompts that share a beginning, in pieces up to a stop string, and interrupted ones."""
    policies = Policies(tmp_path / "model", Qwen3MoeConfig(**SIZES, head_dim=8, **EXPERTS))
    settings = replace(rollout_config, path=str(policies.folder), routing_replay=True)
    engine = ServerEngine(SGLangEngine(settings), log_folder=tmp_path, name="experts")
    await engine.start()
    try:
        prompts = [[3, 11, 7, 5 + i] for i in range(4)]
        sampling = GenerationConfig(max_new_tokens=100, stop=["none of these"])
        answers = await asyncio.gather(*(engine.generate(it, sampling) for it in prompts))

        has_begun, num_sampled = asyncio.Event(), 0

        def note(token_ids: Sequence[int]) -> None:
            nonlocal num_sampled
            num_sampled += len(token_ids)
            if num_sampled > 40:
                has_begun.set()

        longer = GenerationConfig(max_new_tokens=700)
        calls = [engine.generate(it, longer) for it in prompts[1:]]
        calls.append(engine.generate(prompts[0], longer, on_tokens=note))
        running = [asyncio.create_task(call) for call in calls]
        await has_begun.wait()
        await engine.update_weights(1, policies.source(policies.add()))
        interrupted = await asyncio.gather(*running)
        assert any(set(it.versions) == {0, 1} for it in interrupted)
        given = [*prompts, *prompts[1:], prompts[0]]
        policies.check_all(given, [*answers, *interrupted])
        for prompt, answer in zip(given, [*answers, *interrupted], strict=True):
            assert share_of_others(policies, prompt, answer) <= 0.01  # near ties
    finally:
        await engine.close()
