"""What is asked of SGLang's servers is asked of vLLM's; and what only these have."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from integration.run_process import TINY_YAML
from integration.sglang.policies import Generating, Policies
from integration.sglang.test_sglang_failures import LONG, PROMPTS, set_scene
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
    test_answers_are_told_across_an_update_and_the_death_of_a_server,
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
from areal_sc.engines.servers.process import (
    ServerProcess,
    mapped_files,
    read_process,
    session_members,
)
from areal_sc.engines.servers.vllm.handle import VLLMEngine
from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(300),
    pytest.mark.long,
]

Until = Callable[[Callable[[], bool]], Awaitable[None]]
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
    url = engine.replicas[0].url
    headers = [{}, {"Authorization": "Bearer "}, {"Authorization": "Bearer wrong"}]
    async with aiohttp.ClientSession() as session:
        for method, route in ROUTES:
            for shown in headers:
                async with session.request(method, url + route, headers=shown, json={}) as reply:
                    assert reply.status == 401, (route, shown)


async def test_servers_that_run_already_get_the_trainers_weights(
    engine: ServerEngine, policies: Policies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they sample then has the log-probabilities that the trainer computes."""
    replicas = engine.replicas
    assert replicas[0].server
    monkeypatch.setenv(KEY_VARIABLE, replicas[0].server.api_key)
    overrides = (
        *("--config", str(TINY_YAML), f"run_dir={tmp_path / 'run'}", "task.gate=unused"),
        *(f"actor.path={policies.folder}", "actor.optimizer.lr=2e-3", "rollout.num_workers=2"),
        *("rollout.engine=vllm", f"vllm.urls=[{','.join(r.url for r in replicas)}]"),
        *(f"vllm.api_key_env={KEY_VARIABLE}", "weight_update.method=disk"),
    )
    await asyncio.to_thread(train_and_compare, load_config(overrides, GRPOConfig))
    assert engine.stats()["serving_servers"] == 2
    await publish(engine, policies)  # they are the engine's again


async def test_vllm_is_not_installed(engine: ServerEngine, tmp_path: Path) -> None:
    handle = VLLMEngine(replace(engine._config, vllm=VLLMConfig(python=sys.executable)))
    other = ServerEngine(handle, log_folder=tmp_path / "logs", name="other")
    with pytest.raises(ConfigError, match=r"vLLM is not installed for vllm\.python="):
        await other.start()
    await other.close()


async def test_a_killed_core(
    engine: ServerEngine, policies: Policies, until: Until, generating: Generating
) -> None:
    """The server answers running requests with an error before it ends, and is started again."""
    await lose_server(engine, policies, until, generating, lambda server: server.schedulers[0])
    await until(lambda: engine.stats()["serving_servers"] == 2)


async def test_a_killed_server(
    engine: ServerEngine, policies: Policies, until: Until, generating: Generating
) -> None:
    """The last test: nobody waits for the server to come back."""
    await lose_server(engine, policies, until, generating, lambda server: server.pid)


async def lose_server(
    engine: ServerEngine,
    policies: Policies,
    until: Until,
    generating: Generating,
    killed: Callable[[ServerProcess], int],
) -> None:
    """A process of one of two servers is killed: no answer is lost, and nothing of it is left."""
    scene = await set_scene(engine, until, generating)
    processes = session_members(scene.server.pid)
    shared = mapped_files(scene.server.pid, VLLMEngine.session_files)
    running = scene.victim.num_running
    os.kill(killed(scene.server), signal.SIGKILL)
    await until(lambda: engine.stats()["serving_servers"] == 1)
    version = policies.add()
    await engine.update_weights(version, policies.source(version))
    answers = await asyncio.gather(*scene.tasks)
    policies.check_all(PROMPTS, answers)
    assert all(len(answer.token_ids) == LONG.max_new_tokens for answer in answers)
    assert engine.stats()["lost_requests"] - scene.before["lost_requests"] >= running
    assert not any(read_process(pid) for pid in processes)  # nothing of it is left
    assert shared
    assert not any(map(Path.exists, shared))
