"""What is asked of SGLang's servers is asked of vLLM's; and what only these have."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from integration.run_process import TINY_YAML
from integration.sglang.policies import Generating, Policies
from integration.sglang.test_sglang_failures import Victim
from integration.sglang.test_sglang_generation import (  # noqa: F401
    test_a_cancelled_task_is_ended_on_its_server,
    test_a_pause_holds_answers_and_requests,
    test_a_string_ends_an_answer,
    test_finish_reasons,
    test_greedy_takes_the_most_probable_token,
    test_logprobs_are_those_of_the_request_s_temperature,
    test_rows_of_a_group_share_their_prompt,
    test_temperatures_do_not_mix_in_one_batch,
    test_the_context_is_used_to_its_last_token,
    test_truncated_distributions_have_logprobs_of_their_own,
)
from integration.sglang.test_sglang_run import train_and_compare
from integration.sglang.test_sglang_streams import (  # noqa: F401
    test_a_string_ends_a_stream,
    test_answers_are_told_across_an_update_and_a_lost_connection,
    test_what_a_callback_raises_ends_the_answer_on_its_server,
    test_what_is_told_is_the_answer,
)
from integration.sglang.test_sglang_weights import (  # noqa: F401
    publish,
    test_a_broadcast_replaces_weights_in_the_middle_of_answers,
    test_a_folder_replaces_weights_in_the_middle_of_answers,
    test_a_refused_broadcast_leaves_nobody_waiting,
    test_tensors_replace_weights_in_the_middle_of_answers,
)

from areal_sc.config.schema import GRPOConfig
from areal_sc.config.server_settings import VLLMConfig
from areal_sc.engines.servers.engine import ServerEngine
from areal_sc.engines.servers.vllm.handle import VLLMEngine
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]

KEY_VARIABLE = "KEY_OF_VLLM_SERVERS"
ROUTES = [
    ("GET", "/health"),
    ("GET", "/metrics"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/pause"),
    ("POST", "/collective_rpc"),
    ("POST", "/update_weight_version"),
    ("POST", "/no/such/route"),
]


async def test_nobody_gets_in_without_the_key(engine: ServerEngine) -> None:
    """vLLM itself asks for it on some routes only."""
    url = engine.server.url
    headers = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}]
    async with aiohttp.ClientSession() as session:
        for method, route in ROUTES:
            for shown in headers:
                async with session.request(method, url + route, headers=shown, json={}) as reply:
                    assert reply.status == 401, (route, shown)


async def test_a_server_that_runs_already_gets_the_trainers_weights(
    engine: ServerEngine, policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it samples then has the log-probabilities that the trainer computes."""
    assert engine.server.process
    monkeypatch.setenv(KEY_VARIABLE, engine.server.process.api_key)
    overrides = (
        *("--config", str(TINY_YAML), f"run_dir={tmp_path / 'run'}", "task.gate=unused"),
        *(f"actor.path={policies.folder}", "actor.optimizer.lr=2e-3"),
        "generation.stop_token_ids=[1]",  # its own end is no token that it samples
        *("rollout.engine=vllm", f"servers.urls=[{engine.server.url}]"),
        *(f"servers.api_key_env={KEY_VARIABLE}", "weight_update.method=disk"),
    )
    await asyncio.to_thread(train_and_compare, load_config(overrides, GRPOConfig))
    await publish(engine, policies)  # it is the engine's again


async def test_vllm_is_not_installed(engine: ServerEngine, tmp_path: Path) -> None:
    handle = VLLMEngine(replace(engine._config, vllm=VLLMConfig(python=sys.executable)))
    other = ServerEngine(handle, log_folder=tmp_path / "logs", name="other")
    with pytest.raises(ConfigError, match=r"vLLM is not installed for vllm\.python="):
        await other.start()
    await other.close()


async def test_a_killed_core(doomed: ServerEngine, generating_there: Generating) -> None:
    """The server answers running requests with an error before it ends."""
    victim = await Victim.find(doomed, generating_there)
    os.kill(victim.process.schedulers[0], signal.SIGKILL)
    await victim.check_loss(".*")


async def test_a_killed_server(doomed: ServerEngine, generating_there: Generating) -> None:
    victim = await Victim.find(doomed, generating_there)
    os.kill(victim.process.pid, signal.SIGKILL)
    await victim.check_loss(".*")
