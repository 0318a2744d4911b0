"""The command line of an SGLang server, from the settings, and the versions that understand it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.handle import ServerInstance
from areal_sc.errors import ConfigError

OLDEST_VERSION = (0, 5, 11)
"""The first that holds running requests while its weights are replaced (pause mode `retract`)."""

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


def server_arguments(config: RolloutConfig, instance: ServerInstance) -> list[str]:
    """What follows `python -m sglang.launch_server`; `sglang.args` overrides our defaults.

    Raises: ConfigError: `sglang.args` holds an argument that has a setting of its own.
    """
    servers = config.sglang
    given = {name.removeprefix("--").replace("-", "_"): v for name, v in servers.args.items()}
    for name in given:
        if name in SETTINGS_OF:
            raise ConfigError(f"sglang.args.{name}: set {SETTINGS_OF[name]} instead")
    context_tokens = config.max_context_tokens + CONTEXT_SLACK_TOKENS
    slots = -(-config.max_running_sequences // servers.num_servers)
    arguments: dict[str, Any] = {
        "model_path": config.path,
        "dtype": str(config.dtype),
        "host": servers.host,
        "port": instance.port,
        "tp_size": servers.tp_size,
        "random_seed": config.seed + instance.index,
        "context_length": context_tokens,
        "max_running_requests": slots,
        "skip_tokenizer_init": True,  # token ids go in and come out
        "sleep_on_idle": True,
        "weight_version": "0",
        "api_key": instance.api_key,
    }
    if not instance.is_cuda:
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


def check_version(version: str, whose: str) -> None:
    """Raises ConfigError when this SGLang is too old to be driven."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST_VERSION:
        oldest = ".".join(map(str, OLDEST_VERSION))
        raise ConfigError(
            f"{whose} is SGLang {version or 'of an unknown version'}: {oldest} or newer is needed"
        )
