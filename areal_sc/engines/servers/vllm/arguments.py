"""The command line of a vLLM server, from the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import RolloutConfig
from areal_sc.engines.servers.command_line import NUM_SEEDS, as_command_line, given_arguments
from areal_sc.engines.servers.handle import LOOPBACK, ServerInstance
from areal_sc.errors import ConfigError, ModelError
from areal_sc.sizing.model_folder import read_model_shape, reads_pictures
from areal_sc.sizing.worker_plan import DTYPE_BYTES

OLDEST_VERSION = (0, 32, 0)
"""The first that tells which weights sampled which token, and holds requests for an update."""

MAX_CPU_KV_TOKENS = 1 << 16
"""Default KV cache on a CPU: vLLM's own is a share of the memory, as if it had it alone."""

CPU_BLOCK_TOKENS = 32
"""Only whole blocks of a prompt are shared; vLLM's own are of 128 tokens."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM has kernels for; smaller adapters fit."""

_MIN_CPU_KV_BYTES = 4 << 20
"""Some blocks, however small the model."""

_UNKNOWN_CPU_KV_BYTES = 1 << 30
"""Bytes of KV cache for a model whose shape cannot be read."""

SETTINGS_OF: Mapping[str, str] = {
    "model": "rollout.path",
    "tokenizer": "rollout.path",
    "config": "each of its values in vllm.args",
    "dtype": "rollout.dtype",
    "seed": "rollout.seed",
    "max_model_len": "rollout.max_context_tokens",
    "host": "nothing, as servers listen on loopback alone",
    "port": "nothing, as a free one is found",
    "tensor_parallel_size": "servers.tp_size",
    "pipeline_parallel_size": "servers.tp_size",
    "data_parallel_size": "rollout.num_workers",
    "api_key": "a random key",
    "logprobs_mode": "nothing, as training needs the one that is set",
    "generation_config": "generation",
    "enable_sleep_mode": "placement",
    "enable_lora": "actor.lora.publish_merged",
    "lora_modules": "actor.lora.path",
    "max_lora_rank": "actor.lora.rank",
    "worker_extension_cls": "nothing, as weights come by it",
    "distributed_executor_backend": "nothing, as ranks are watched as processes",
}
"""Arguments of vLLM that have a setting here, and may not be given a second time."""


def server_arguments(config: RolloutConfig, instance: ServerInstance) -> list[str]:
    """What follows vLLM's main program; `vllm.args` overrides our defaults.

    Raises: ConfigError: `vllm.args` holds an argument that has a setting of its own. ModelError: on
        a CPU, a mixture of experts.
    """
    servers = config.servers
    given = given_arguments(config.vllm.args, SETTINGS_OF, "vllm")
    slots, is_text = config.max_running_sequences, not reads_pictures(config.path)
    arguments: dict[str, Any] = {
        "model": config.path,
        # token ids go in and come out; the image processor alone needs a tokenizer
        "skip_tokenizer_init": is_text,
        "tokens_only": is_text,
        "enable_scale_out": True,  # the route for them
        "generation_config": "vllm",  # none of the folder's: requests say all
        "dtype": str(config.dtype),
        "host": LOOPBACK,
        "port": instance.port,
        "tensor_parallel_size": servers.tp_size,
        "distributed_executor_backend": "mp",
        "seed": config.seed % NUM_SEEDS,
        "max_model_len": config.max_context_tokens,
        "max_num_seqs": slots,
        "logprobs_mode": "processed_logprobs",  # of the distribution that is sampled from
        "enable_prompt_tokens_details": True,
        "disable_uvicorn_access_log": True,
        "api_key": instance.api_key,
        "middleware": "areal_sc_in_vllm.key.DemandKey",
        "worker_extension_cls": "areal_sc_in_vllm.weights.WeightLoader",
    }
    if not is_text:
        # its two ends forget pictures at different times, and requests fail then
        arguments |= {"mm_processor_cache_gb": 0}
    if config.placement is Placement.turns:
        arguments |= {"enable_sleep_mode": True}
    rank = next((rank for rank in LORA_RANKS if rank >= config.lora.rank), config.lora.rank)
    if config.lora.is_published_alone:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": rank,
            "max_num_seqs": slots + 1,  # a probe waits for no answer
            "max_loras": 2,  # the one that is served, and the one that is loaded beside it
        }
    if config.lora.is_named:
        if not instance.is_cuda:
            raise ConfigError(
                "actor.lora.places: expected 1 with rollout.engine=vllm on a CPU, where vLLM "
                "computes with an adapter also if a request names none"
            )
        arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": config.lora.places}
    if not instance.is_cuda:
        _check_has_no_experts(config.path)
        tokens = max(
            config.max_context_tokens, min(slots * config.max_context_tokens, MAX_CPU_KV_TOKENS)
        )
        arguments |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_TOKENS,
            "kv_cache_memory_bytes": _kv_bytes(config, tokens),
        }
    return as_command_line(arguments | given)


def _check_has_no_experts(path: str) -> None:
    """vLLM packs their weights for its CPU kernels when it starts, but not when they are replaced.

    It would answer with others than it was given (vLLM 0.32).
    """
    shape = read_model_shape(path)
    if shape is not None and shape.num_expert_parameters:
        raise ModelError(
            f"model folder {path}: it is a mixture of experts, whose weights vLLM cannot replace "
            "on a CPU; set rollout.engine=sglang or rollout.engine=local"
        )


def _kv_bytes(config: RolloutConfig, num_tokens: int) -> int:
    """Bytes of KV cache that one rank has for so many tokens."""
    values = (shape := read_model_shape(config.path)) and shape.kv_values_per_token
    if not values:
        return _UNKNOWN_CPU_KV_BYTES
    token_bytes = -(-values * DTYPE_BYTES[config.dtype] // config.servers.tp_size)
    return max(_MIN_CPU_KV_BYTES, num_tokens * token_bytes)
