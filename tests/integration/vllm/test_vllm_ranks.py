"""A server of two ranks answers exactly, and gets weights by every method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from integration.sglang.policies import Policies
from integration.sglang.test_sglang_experts import check_every_method

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.vllm.handle import VLLMEngine

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]


async def test_a_server_of_two_ranks(rollout_config: RolloutConfig, tmp_path: Path) -> None:
    """They have one head of queries each, and copies of the one of keys and values."""
    policies = Policies(tmp_path / "model")
    servers = replace(rollout_config.servers, tp_size=2)
    settings = replace(rollout_config, path=str(policies.folder), servers=servers)
    engine = ServerEngine(VLLMEngine(settings), log_folder=tmp_path, name="ranks")
    await engine.start()
    try:
        assert engine.count_ranks() == 2
        await check_every_method(engine, policies, tmp_path)
    finally:
        await engine.close()
