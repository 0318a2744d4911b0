"""What scripts and controllers know of vLLM servers.

vLLM takes a share of each GPU for parameters and KV cache together, `gpu_memory_utilization`,
whatever it needs. It is a share of the whole memory of the card, and it must be free when a server
starts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from areal_sc.config.schema import Dtype, GRPOConfig, WeightUpdateMethod
from areal_sc.engines.servers.handle import ServerInstance, ServersHandle, with_path
from areal_sc.engines.servers.vllm.arguments import server_arguments
from areal_sc.errors import ConfigError


@dataclass(frozen=True)
class VLLMEngine(ServersHandle):
    """Generation by vLLM servers, which a worker starts or connects to: `config.vllm`."""

    name: ClassVar[str] = "vLLM"
    section: ClassVar[str] = "vllm"
    module: ClassVar[str] = "areal_sc_in_vllm"
    share_argument: ClassVar[str] = "gpu-memory-utilization"
    default_share: ClassVar[float] = 0.9
    picture_families: ClassVar[Sequence[str]] = ("idefics3", "qwen2_5_vl", "qwen3_vl", "smolvlm")
    client_class: ClassVar[str] = "areal_sc.engines.servers.vllm.client:VLLMClient"
    scheduler_title: ClassVar[str] = "VLLM::"  # the core, which schedules, and the workers
    # Queues between a server's processes. Other programs have files of such names, too, so only
    # those are deleted that the processes of a server were seen to map.
    session_files: ClassVar[str] = "psm_*"
    support_setting: ClassVar[str] = "vllm.args"  # there is no limit

    def arguments(self, instance: ServerInstance) -> list[str]:
        return server_arguments(self.config, instance)

    def environment(self, instance: ServerInstance) -> dict[str, str]:
        environment = {
            "PYTHONPATH": with_path(Path(__file__).with_name("in_server")),
            "VLLM_SERVER_DEV_MODE": "1",  # the routes that pause it and replace its weights
            # A server's context may exceed what the model was made for.
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        if self.config.lora.is_published_alone or self.config.lora.is_named:
            environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if not instance.is_cuda:
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # or all servers share a core
            environment["TORCHDYNAMO_DISABLE"] = "1"  # it would compile for half a minute
        return environment

    def check(self, run: GRPOConfig) -> None:
        super().check(run)
        if self.config.float32_output_layer and self.config.dtype != Dtype.float32:
            raise ConfigError(
                "rollout.float32_output_layer: expected false with rollout.engine=vllm, which "
                "rounds logits to rollout.dtype, got true"
            )
        if self.servers.urls and run.weight_update.method != WeightUpdateMethod.disk:
            raise ConfigError(
                "weight_update.method: expected disk with servers.urls (the other ways need a part "
                "of this package in the servers, which those that a run starts have), got "
                f"{run.weight_update.method}"
            )

    def kv_cache_bytes(
        self, given: Mapping[str, str], token_bytes: int, left: Callable[[], int | None]
    ) -> int:
        if (name := "kv-cache-memory-bytes") in given:
            return self._count(given, name, least=0)
        return left() or 0
