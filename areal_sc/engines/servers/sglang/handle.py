"""What scripts and controllers know of SGLang servers.

SGLang takes a share of each GPU for parameters and KV cache together, `mem_fraction_static`,
whatever it needs. It is a share of the memory that is free when a server starts. Trainers start
before, so it is a share of what they leave. The rest is for what both need in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from areal_sc.engines.servers.handle import ServerInstance, ServersHandle
from areal_sc.engines.servers.memory import MemoryShare
from areal_sc.engines.servers.sglang.arguments import server_arguments
from areal_sc.errors import ConfigError
from areal_sc.sizing.machine import Machine
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.worker_plan import DTYPE_BYTES, RunPlan, WorkerPlan

_SHARE = MemoryShare("sglang", "mem-fraction-static", 0.88)
"""SGLang reserves more than that on small cards."""


@dataclass(frozen=True)
class SGLangEngine(ServersHandle):
    """Generation by SGLang servers, which a worker starts or connects to: `config.sglang`."""

    name: ClassVar[str] = "SGLang"
    section: ClassVar[str] = "sglang"
    module: ClassVar[str] = "sglang.launch_server"
    client_class: ClassVar[str] = "areal_sc.engines.servers.sglang.client:SGLangClient"
    scheduler_title: ClassVar[str] = "scheduler"
    support_setting: ClassVar[str] = "sglang.args.sampling_mask_max_tokens"
    # in which a server's processes tell each other how busy they are
    session_files: ClassVar[str] = "sglang_loads_*.shm"
    left_files: ClassVar[str] = session_files

    def arguments(self, instance: ServerInstance) -> list[str]:
        return server_arguments(self.config, instance)

    def environment(self, instance: ServerInstance) -> dict[str, str]:
        # A server's context may exceed what the model was made for; no token is ever placed there.
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
        if not instance.is_cuda:
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        return environment

    def plan_rank(self, shape: ModelShape, device: str, machine: Machine) -> WorkerPlan:
        instance = ServerInstance(0, 0, "", is_cuda=device != "cpu")
        words = self.arguments(instance)
        given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
        value_bytes, tp_size = DTYPE_BYTES[self.config.dtype], self.servers.tp_size
        parameter_bytes = -(-value_bytes * (shape.num_parameters or 0) // tp_size)
        asked_bytes: int | None = None  # of KV cache; None: as much as there is
        if "max-total-tokens" in given:
            token_bytes = -(-value_bytes * (shape.kv_values_per_token or 0) // tp_size)
            asked_bytes = _max_total_tokens(given) * token_bytes
        kv_bytes = asked_bytes or 0
        memory = None
        if instance.is_cuda:
            memory = machine.cuda_memory_bytes[int(device.removeprefix("cuda:"))]
        if memory is not None:
            left = _SHARE.kv_bytes(given, device, memory, parameter_bytes)
            kv_bytes = left if asked_bytes is None else min(left, asked_bytes)
        return WorkerPlan("server", 0, device, parameter_bytes=parameter_bytes, kv_bytes=kv_bytes)

    def way_out(self, plan: RunPlan) -> str | None:
        return _SHARE.way_out(plan)


def _max_total_tokens(given: Mapping[str, str]) -> int:
    """Raises: ConfigError: `sglang.args.max_total_tokens` is no count."""
    text = given["max-total-tokens"]
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"sglang.args.max_total_tokens: expected a count above 0, got {text}")
    return int(text)
