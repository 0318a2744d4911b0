"""A mixture of experts, fused in the trainers' memory, reaches a real server by every method."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from integration.sglang.policies import SIZES, Policies
from integration.sglang.trainer import Trainer
from transformers import Qwen3MoeConfig

from areal_sc.config.schema import GenerationConfig, RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.sglang.handle import SGLangEngine

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(600)]

PROMPTS = [[3 + i, 11 + i] for i in range(4)]
SAMPLING = GenerationConfig(max_new_tokens=20)


async def check_answers(engine: ServerEngine, policies: Policies, version: int) -> None:
    answers = await asyncio.gather(*(engine.generate(prompt, SAMPLING) for prompt in PROMPTS))
    assert all(set(answer.versions) == {version} for answer in answers)
    policies.check_all(PROMPTS, answers)


async def check_every_method(engine: ServerEngine, policies: Policies, folder: Path) -> None:
    """Answers are those of the weights that the server started with, and of each that it gets.

    Args:
        policies: of which the engine has version 0, the only one.
        folder: for weights that come by a folder.
    """
    await check_answers(engine, policies, 0)
    await engine.update_weights(1, policies.source(policies.add()))
    await check_answers(engine, policies, 1)

    trainer = Trainer(policies, "group", num_ranks=1 + engine.count_ranks())
    await trainer.meet(engine)
    policies.add()
    await asyncio.gather(trainer.send(2), trainer.receive(engine, 2))
    assert engine.has_whole_group("group")  # it did not get them another way
    await check_answers(engine, policies, 2)
    await engine.leave_group("group")
    trainer.broadcaster.close()

    saved = policies.save(policies.add(), folder / "new")
    await engine.update_weights_from_disk(3, saved)
    await check_answers(engine, policies, 3)


async def test_fused_experts_reach_a_server_by_every_method(
    rollout_config: RolloutConfig, tmp_path: Path
) -> None:
    config = Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    )
    policies = Policies(tmp_path / "model", config)
    settings = replace(
        rollout_config,
        path=str(policies.folder),
    )
    engine = ServerEngine(SGLangEngine(settings), log_folder=tmp_path, name="experts")
    await engine.start()
    try:
        names = [name for name, _ in policies.named_tensors(0)]
        assert "model.layers.0.mlp.experts.gate_up_proj" in names  # one tensor of all experts
        await check_every_method(engine, policies, tmp_path)
    finally:
        await engine.close()
