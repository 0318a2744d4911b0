"""The settings of vLLM servers, the command line that they become, and their memory."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_sc.config.schema import Dtype, GRPOConfig, RolloutConfig, WeightUpdateMethod
from areal_sc.config.server_settings import ServersConfig, VLLMConfig
from areal_sc.engines.handle_names import handle_from_plain
from areal_sc.engines.handles import VLLMEngine, make_generator
from areal_sc.engines.servers.handle import ServerInstance
from areal_sc.engines.servers.vllm.arguments import server_arguments
from areal_sc.errors import ConfigError, ModelError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape

PLACE = ServerInstance(port=4000, api_key="secret", is_cuda=False)
ON_GPU = ServerInstance(port=4000, api_key="secret", is_cuda=True)
GIB = 1 << 30


def rollout(**settings: Any) -> RolloutConfig:
    plain = {
        "path": "/model",
        "dtype": Dtype.bfloat16,
        "seed": 7 + 2**40,
        "max_context_tokens": 100,
    }
    return RolloutConfig(**{**plain, "max_running_sequences": 10, "engine": "vllm", **settings})


def test_the_setting_chooses_the_engine() -> None:
    assert isinstance(make_generator(rollout()), VLLMEngine)
    assert isinstance(handle_from_plain("VLLMEngine", {"path": "/model"}), VLLMEngine)


def test_settings_reach_the_server() -> None:
    arguments = server_arguments(rollout(servers=ServersConfig(tp_size=2)), PLACE)
    assert {
        "--model=/model",
        "--dtype=bfloat16",
        "--port=4000",
        "--tensor-parallel-size=2",
        "--seed=7",  # of 32 bits
        "--max-model-len=100",
        "--max-num-seqs=10",
        "--logprobs-mode=processed_logprobs",
        "--api-key=secret",
        "--enforce-eager",
    } <= set(arguments)
    assert "--dtype=float16" in server_arguments(rollout(dtype=Dtype.float16), PLACE)


def test_arguments_of_the_user_come_first() -> None:
    vllm = VLLMConfig(args={"--max-num-seqs": 99, "swap-space": 2, "enforce_eager": None})
    arguments = server_arguments(rollout(vllm=vllm), PLACE)
    assert {"--max-num-seqs=99", "--swap-space=2"} <= set(arguments)
    assert "--enforce-eager" not in arguments
    for name, setting in (
        ("port", "nothing, as a free one is found"),
        ("logprobs-mode", "nothing, as training"),
    ):
        with pytest.raises(ConfigError, match=rf"vllm\.args\.{name[:4]}.*: set {setting}"):
            server_arguments(rollout(vllm=VLLMConfig(args={name: 1})), PLACE)


def test_the_cache_of_a_server_on_a_cpu_is_what_its_slots_need(tiny_model_folder: Path) -> None:
    """2 layers with keys and values of 2 heads of 8; 5 slots of 200 tokens in float32."""
    config = rollout(path=str(tiny_model_folder), dtype=Dtype.float32, max_context_tokens=200)
    config.max_running_sequences = 100
    assert f"--kv-cache-memory-bytes={100 * 200 * 4 * 2 * 2 * 2 * 8}" in server_arguments(
        config, PLACE
    )
    on_gpu = server_arguments(config, ON_GPU)
    assert not any(a.startswith(("--kv-cache", "--enforce-eager")) for a in on_gpu)


def test_experts_are_not_served_on_a_cpu(tmp_path: Path) -> None:
    """Their new weights would be read as if they were packed."""
    (tmp_path / "config.json").write_text("{}")
    tensors = {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((4, 4), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    config = rollout(path=str(tmp_path))
    with pytest.raises(ModelError, match=r"mixture of experts, whose weights vLLM cannot replace"):
        server_arguments(config, PLACE)
    server_arguments(config, ON_GPU)


def test_its_processes_find_what_runs_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    own, mine = VLLMEngine(rollout()).environment(PLACE)["PYTHONPATH"].split(os.pathsep)
    assert mine == "/mine"
    assert [path.name for path in Path(own).iterdir() if (path / "__main__.py").exists()] == [
        VLLMEngine.module
    ]


@pytest.mark.parametrize("method", ["pull", "collective"])
def test_servers_of_others_get_weights_by_a_folder_alone(method: str) -> None:
    run = GRPOConfig(run_dir="r", total_steps=1)
    run.weight_update.method = WeightUpdateMethod(method)
    handle = VLLMEngine(rollout(servers=ServersConfig(urls=["http://host:8000"])))
    with pytest.raises(ConfigError, match=r"weight_update\.method: expected disk"):
        handle.check(run)
    run.weight_update.method = WeightUpdateMethod.disk
    handle.check(run)


def test_memory_on_a_gpu() -> None:
    shape = ModelShape(num_parameters=GIB, kv_values_per_token=100)
    machine = Machine(host_memory_bytes=None, cuda_memory_bytes=(10 * GIB,))
    plan = VLLMEngine(rollout()).plan_rank(0, shape, "cuda:0", machine)
    assert plan.parameter_bytes == 2 * GIB
    assert plan.kv_bytes == 7 * GIB  # nine tenths, less the parameters
    few = VLLMEngine(rollout(vllm=VLLMConfig(args={"gpu_memory_utilization": 0.1})))
    with pytest.raises(ConfigError, match=r"vllm\.args\.gpu_memory_utilization: 0\.1 of what"):
        few.plan_rank(0, shape, "cuda:0", machine)
    given = VLLMEngine(rollout(vllm=VLLMConfig(args={"kv_cache_memory_bytes": 5})))
    assert given.plan_rank(0, shape, "cuda:0", machine).kv_bytes == 5
