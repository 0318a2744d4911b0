"""The command line of an SGLang server, from the settings, and the versions that understand it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import Dtype, RolloutConfig
from areal_sc.engines.servers.command_line import NUM_SEEDS, as_command_line, given_arguments
from areal_sc.engines.servers.handle import LOOPBACK, ServerInstance
from areal_sc.sizing.model_folder import reads_pictures

OLDEST_VERSION = (0, 5, 11)
"""The first that holds running requests while its weights are replaced (pause mode `retract`)."""

NEWER_VERSION = (0, 5, 21)
"""The first with sessions of weight updates, and with log-probabilities under truncated
distributions."""

CONTEXT_SLACK_TOKENS = 8
"""SGLang keeps a few positions of its context for itself: prompts may have up to 6 tokens less."""

MAX_CPU_KV_TOKENS = 1 << 16
"""Default KV cache on a CPU: SGLang's own is a share of the memory, as if it had it alone."""

NUM_ADAPTERS = 3
"""The one that is served, the one that is loaded beside it, and none, as in a probe."""

SETTINGS_OF: Mapping[str, str] = {
    "model_path": "rollout.path",
    "model": "rollout.path",
    "config": "each of its values in sglang.args",
    "dtype": "rollout.dtype",
    "enable_fp32_lm_head": "rollout.float32_output_layer",
    "device": "rollout.device",
    "random_seed": "rollout.seed",
    "context_length": "rollout.max_context_tokens",
    "host": "nothing, as servers listen on loopback alone",
    "port": "nothing, as a free one is found",
    "tp_size": "servers.tp_size",
    "tensor_parallel_size": "servers.tp_size",
    "tp": "servers.tp_size",
    "dp_size": "rollout.num_workers",
    "dp": "rollout.num_workers",
    "data_parallel_size": "rollout.num_workers",
    "pp_size": "servers.tp_size",
    "pipeline_parallel_size": "servers.tp_size",
    "base_gpu_id": "CUDA_VISIBLE_DEVICES of the run",
    "api_key": "a random key",
    "admin_api_key": "a random key",
    "weight_version": "the policy version",
    "enable_memory_saver": "placement",
    "enable_return_routed_experts": "actor.routing_replay",
    "enable_lora": "actor.lora.publish_merged",
    "lora_paths": "actor.lora.path",
    "max_lora_rank": "actor.lora.rank",
    "lora_target_modules": "actor.lora.targets",
}
"""Arguments of SGLang that have a setting here, and may not be given a second time."""


def server_arguments(config: RolloutConfig, instance: ServerInstance) -> list[str]:
    """What follows `python -m sglang.launch_server`; `sglang.args` overrides our defaults.

    Raises: ConfigError: `sglang.args` holds an argument that has a setting of its own.
    """
    servers = config.servers
    given = given_arguments(config.sglang.args, SETTINGS_OF, "sglang")
    context_tokens = config.max_context_tokens + CONTEXT_SLACK_TOKENS
    slots = config.max_running_sequences
    arguments: dict[str, Any] = {
        "model_path": config.path,
        "dtype": str(config.dtype),
        "enable_fp32_lm_head": config.float32_output_layer and config.dtype != Dtype.float32,
        "host": LOOPBACK,
        "port": instance.port,
        "tp_size": servers.tp_size,
        "random_seed": config.seed % NUM_SEEDS,
        "context_length": context_tokens,
        "max_running_requests": slots,
        "skip_tokenizer_init": True,  # token ids go in and come out
        "incremental_streaming_output": True,  # else each part has all tokens before it, too
        "sleep_on_idle": True,
        "weight_version": "0",
        "api_key": instance.api_key,
        "enable_memory_saver": config.placement is Placement.turns,
        "enable_return_routed_experts": config.routing_replay,
    }
    if reads_pictures(config.path):
        arguments |= {"disable_fast_image_processor": True}  # as trainers, which use the other one
    if config.lora.is_published_alone or config.lora.is_named:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": config.lora.rank,
            "lora_target_modules": [name.rpartition(".")[2] for name in config.lora.targets]
            or ["all"],
            "max_loras_per_batch": max(NUM_ADAPTERS, config.lora.places + 1),  # or none
            "max_running_requests": slots + 1,  # a probe waits for no answer
            "lora_backend": None if instance.is_cuda else "torch_native",
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
