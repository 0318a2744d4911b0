"""The settings of SGLang servers, and the command line that they become."""

from __future__ import annotations

import re
from typing import Any

import pytest

from areal_sc.config.schema import Dtype, RolloutConfig
from areal_sc.config.server_settings import ServersConfig, SGLangConfig
from areal_sc.engines.servers.client import ServerAbilities
from areal_sc.engines.servers.command_line import as_command_line, check_version
from areal_sc.engines.servers.handle import ServerInstance
from areal_sc.engines.servers.process import server_environment
from areal_sc.engines.servers.sglang.arguments import OLDEST_VERSION, server_arguments
from areal_sc.engines.servers.sglang.handle import SGLangEngine
from areal_sc.errors import ConfigError, ModelError

PLACE = ServerInstance(port=4000, api_key="secret", is_cuda=False)
ON_GPU = ServerInstance(port=4000, api_key="secret", is_cuda=True)


def rollout(**settings: Any) -> RolloutConfig:
    plain = {
        "path": "/model",
        "dtype": Dtype.bfloat16,
        "seed": 7 + 2**40,
        "max_context_tokens": 100,
    }
    return RolloutConfig(**{**plain, "max_running_sequences": 10, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"urls": ["localhost:30000"]}, r"servers\.urls: expected http://host:port, got"),
        ({"urls": ["http://a:1", "http://a:1/"]}, r"servers\.urls names a server twice"),
        ({"urls": ["http://a:99999"]}, r"servers\.urls: expected http://host:port, got"),
    ],
)
def test_impossible_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SGLangEngine(rollout(servers=ServersConfig(**settings))).check_servers()


def test_an_interpreter_that_is_none() -> None:
    sglang = SGLangConfig(python="/no/such/python")
    with pytest.raises(ConfigError, match=r"sglang\.python: '/no/such/python' is no program"):
        SGLangEngine(rollout(sglang=sglang)).check_servers()


def test_possible_settings() -> None:
    SGLangEngine(rollout()).check_servers()
    elsewhere = ServersConfig(urls=["https://host"])
    sglang = SGLangConfig(python="/no/such/python")
    SGLangEngine(rollout(servers=elsewhere, sglang=sglang)).check_servers()


def test_a_command_line() -> None:
    given = {"tp_size": 2, "flag": True, "off": False, "none": None, "list": [1, "b"], "key": "-x"}
    assert as_command_line(given) == ["--tp-size=2", "--flag", "--list", "1", "b", "--key=-x"]


def test_settings_reach_the_server() -> None:
    arguments = server_arguments(rollout(servers=ServersConfig(tp_size=2)), PLACE)
    assert {
        "--model-path=/model",
        "--dtype=bfloat16",
        "--port=4000",
        "--tp-size=2",
        "--random-seed=7",  # of 32 bits
        "--context-length=108",
        "--max-running-requests=10",
        "--max-total-tokens=1080",
        "--api-key=secret",
        "--device=cpu",
    } <= set(arguments)
    assert "--dtype=float16" in server_arguments(rollout(dtype=Dtype.float16), PLACE)


def test_a_float32_output_layer_is_asked_for_where_it_changes_something() -> None:
    word = "--enable-fp32-lm-head"
    assert word not in server_arguments(rollout(), ON_GPU)
    assert word in server_arguments(rollout(float32_output_layer=True), ON_GPU)
    float32 = rollout(float32_output_layer=True, dtype=Dtype.float32)
    assert word not in server_arguments(float32, ON_GPU)


def test_arguments_of_the_user_come_first() -> None:
    sglang = SGLangConfig(
        args={"--max-running-requests": 99, "attention_backend": None, "enable_metrics": True}
    )
    arguments = server_arguments(rollout(sglang=sglang), PLACE)
    assert "--max-running-requests=99" in arguments
    assert "--enable-metrics" in arguments
    assert not any(argument.startswith("--attention-backend") for argument in arguments)
    for name, setting in (
        ("port", "nothing, as a free one is found"),
        ("dp_size", "rollout.num_workers"),
    ):
        with pytest.raises(ConfigError, match=rf"\.{name}: set {re.escape(setting)} instead"):
            server_arguments(rollout(sglang=SGLangConfig(args={name: 1})), PLACE)


def test_cpu_defaults_are_not_given_to_gpus() -> None:
    arguments = server_arguments(rollout(), ON_GPU)
    assert not any(a.startswith(("--device", "--max-total-tokens")) for a in arguments)


def test_a_server_asks_itself_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "in.house")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "8,9")
    told = {"HTTP_PROXY": "http://proxy:1", "no_proxy": "of.server"}
    servers = ServersConfig(environment=told)
    environment = server_environment(SGLangEngine(rollout(servers=servers)), ON_GPU)
    assert environment["HTTP_PROXY"] == "http://proxy:1"
    assert environment["CUDA_VISIBLE_DEVICES"] == "8,9"  # those of its worker
    spared = {"of.server", "in.house", "127.0.0.1"}
    assert spared <= set(environment["no_proxy"].split(","))
    assert environment["NO_PROXY"] == environment["no_proxy"]


@pytest.mark.parametrize("version", ["0.5.11", "0.5.15.post1", "0.5.23", "0.6.0rc1", "1.0"])
def test_versions_that_are_new_enough(version: str) -> None:
    check_version(version, OLDEST_VERSION, "it", "SGLang")


@pytest.mark.parametrize("version", ["0.5.10.post1", "0.4.9", ""])
def test_versions_that_are_too_old(version: str) -> None:
    with pytest.raises(ConfigError, match=r"it is SGLang .*: 0\.5\.11 or newer is needed"):
        check_version(version, OLDEST_VERSION, "it", "SGLang")


def test_a_server_of_the_same_model(tiny_model_folder: Any) -> None:
    abilities = ServerAbilities(
        version="0.5.21",
        model_type="qwen2",
        architectures=("Qwen2ForCausalLM",),
        max_context_tokens=200,
        tp_size=1,
        has_version_spans=True,
        max_support=64,
    )
    abilities.check("url", str(tiny_model_folder), 200)
    with pytest.raises(ConfigError, match=r"takes 200 tokens, but rollout\.max_context_tokens"):
        abilities.check("url", str(tiny_model_folder), 201)
    for name, value in (
        ("model_type", "llama"),
        ("architectures", ("LlamaForCausalLM",)),
    ):
        changed = ServerAbilities(**{**abilities.__dict__, name: value})
        with pytest.raises(ModelError, match=f"another model than .*: {name} is"):
            changed.check("url", str(tiny_model_folder), 200)
