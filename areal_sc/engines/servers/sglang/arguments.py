"""The command line and the environment of a server, from the settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from areal_sc.config.schema import RolloutConfig, SGLangConfig
from areal_sc.errors import ConfigError

CONTEXT_SLACK_TOKENS = 8
"""SGLang keeps a few positions of its context for itself: prompts may have up to 6 tokens less."""

MAX_CPU_KV_TOKENS = 1 << 16
"""Default KV cache on a CPU: SGLang's own is a share of the memory, as if it had it alone."""

SETTINGS_OF: Mapping[str, str] = {
    "model_path": "rollout.path",
    "model": "rollout.path",
    "config": "each of its values in sglang.args",
    "dtype": "rollout.dtype",
    "device": "rollout.device",
    "random_seed": "rollout.seed",
    "context_length": "rollout.max_context_tokens",
    "host": "sglang.host",
    "port": "sglang.ports",
    "tp_size": "sglang.tp_size",
    "tensor_parallel_size": "sglang.tp_size",
    "tp": "sglang.tp_size",
    "dp_size": "sglang.num_servers",
    "dp": "sglang.num_servers",
    "data_parallel_size": "sglang.num_servers",
    "pp_size": "sglang.tp_size",
    "pipeline_parallel_size": "sglang.tp_size",
    "base_gpu_id": "sglang.devices",
    "api_key": "a random key",
    "admin_api_key": "a random key",
    "weight_version": "the policy version",
}
"""Arguments of SGLang that have a setting here, and may not be given a second time."""


@dataclass(frozen=True)
class ServerPlace:
    """What tells one server of a worker from another.

    Attributes:
        index: number of the server, from 0.
        port: that it listens on.
        api_key: that its clients must show.
        is_cuda: it computes on GPUs, else on the CPU.
    """

    index: int
    port: int
    api_key: str
    is_cuda: bool


def server_arguments(config: RolloutConfig, sglang: SGLangConfig, place: ServerPlace) -> list[str]:
    """What follows `python -m sglang.launch_server`; `sglang.args` overrides our defaults.

    Raises: ConfigError: `sglang.args` holds an argument that has a setting of its own.
    """
    given = {name.removeprefix("--").replace("-", "_"): v for name, v in sglang.args.items()}
    for name in given:
        if name in SETTINGS_OF:
            raise ConfigError(f"sglang.args.{name}: set {SETTINGS_OF[name]} instead")
    context_tokens = config.max_context_tokens + CONTEXT_SLACK_TOKENS
    slots = -(-config.max_running_sequences // sglang.num_servers)
    arguments: dict[str, Any] = {
        "model_path": config.path,
        "dtype": str(config.dtype),
        "host": sglang.host,
        "port": place.port,
        "tp_size": sglang.tp_size,
        "random_seed": config.seed + place.index,
        "context_length": context_tokens,
        "max_running_requests": slots,
        "skip_tokenizer_init": True,  # token ids go in and come out
        "sleep_on_idle": True,
        "weight_version": "0",
        "api_key": place.api_key,
    }
    if not place.is_cuda:
        arguments |= {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "disable_cuda_graph": True,
            "max_total_tokens": max(context_tokens, min(slots * context_tokens, MAX_CPU_KV_TOKENS)),
        }
    return as_command_line(arguments | given)


def as_command_line(arguments: Mapping[str, Any]) -> list[str]:
    """`{tp_size: 2, enable_x: true}` as `--tp-size=2 --enable-x`; None and False leave it out."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif isinstance(value, list | tuple):
            words += [option, *map(str, value)]
        else:
            words.append(f"{option}={value}")  # together, as a value may begin with a dash
    return words


def server_environment(sglang: SGLangConfig, place: ServerPlace) -> dict[str, str]:
    """This process's environment, with what the server needs and what the user added."""
    environment = dict(os.environ)
    # The slack above may exceed what the model was made for; no token is ever placed there.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if place.is_cuda:
        environment["CUDA_VISIBLE_DEVICES"] = _devices(sglang, place, environment)
    else:
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment | sglang.environment


def _devices(sglang: SGLangConfig, place: ServerPlace, environment: Mapping[str, str]) -> str:
    """The server's GPUs; indices count the devices that this process sees."""
    first = place.index * sglang.tp_size
    indices = sglang.devices or list(range(sglang.num_servers * sglang.tp_size))
    seen = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    own = indices[first : first + sglang.tp_size]
    if seen and max(own) >= len(seen):
        raise ConfigError(
            f"sglang: server {place.index} needs GPUs {own}, but this worker sees {len(seen)} "
            f"(CUDA_VISIBLE_DEVICES={','.join(seen)})"
        )
    return ",".join(seen[index] if seen else str(index) for index in own)
