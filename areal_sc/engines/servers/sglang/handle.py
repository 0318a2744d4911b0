"""What scripts and controllers know of SGLang servers.

SGLang takes a share of each GPU for parameters and KV cache together, `mem_fraction_static`,
whatever it needs. It is a share of the memory that is free when a server starts. Trainers start
before, so it is a share of what they leave. The rest is for what both need in a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from areal_sc.config.machine import Machine
from areal_sc.config.model_folder import ModelShape
from areal_sc.config.worker_plan import DTYPE_BYTES, HOST, Plan, WorkerPlan, format_bytes
from areal_sc.engines.servers.handle import ServerInstance, ServersHandle
from areal_sc.engines.servers.sglang.arguments import server_arguments
from areal_sc.errors import ConfigError

_DEFAULT_FRACTION = 0.88
"""About what SGLang takes of a GPU by itself; it reserves more on small cards."""

_FRACTION_STEPS = 100
"""`mem_fraction_static` is proposed in hundredths."""

_FRACTION = "sglang.args.mem_fraction_static"
_NEED_LESS = "more devices, or more actor.num_workers, need less on a device"


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
    left_files: ClassVar[str] = "sglang_loads_*.shm"

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
            left = int(_memory_fraction(given) * memory) - parameter_bytes
            if left < 0:
                raise _no_room(device, memory, parameter_bytes, given)
            kv_bytes = left if asked_bytes is None else min(left, asked_bytes)
        return WorkerPlan("server", 0, device, parameter_bytes=parameter_bytes, kv_bytes=kv_bytes)

    def way_out(self, plan: Plan) -> str | None:
        fractions = [_largest_fraction(plan, place) for place in plan.short_places]
        known = [fraction for fraction in fractions if fraction is not None]
        if not known:
            return None
        if min(known) <= 0:
            return (
                f"no value of {_FRACTION} leaves room for what trains on the same device; "
                f"{_NEED_LESS}"
            )
        return f"{_FRACTION} may be at most {min(known):g} beside all else on that device"


def _max_total_tokens(given: Mapping[str, str]) -> int:
    """Raises: ConfigError: `sglang.args.max_total_tokens` is no count."""
    text = given["max-total-tokens"]
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"sglang.args.max_total_tokens: expected a count above 0, got {text}")
    return int(text)


def _memory_fraction(given: Mapping[str, str]) -> float:
    """Raises: ConfigError: `sglang.args.mem_fraction_static` is no share."""
    text = given.get("mem-fraction-static", str(_DEFAULT_FRACTION))
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < 1:
        raise ConfigError(f"{_FRACTION}: expected a number above 0 and below 1, got {text}")
    return fraction


def _no_room(
    device: str, memory: int, parameter_bytes: int, given: Mapping[str, str]
) -> ConfigError:
    """The share of the device does not even hold the parameters."""
    if parameter_bytes * _FRACTION_STEPS > memory * (_FRACTION_STEPS - 1):
        return ConfigError(
            f"no value of {_FRACTION} leaves room for the parameters of a server "
            f"({format_bytes(parameter_bytes)}): what trains on {device} leaves "
            f"{format_bytes(memory)}; {_NEED_LESS}"
        )
    return ConfigError(
        f"{_FRACTION}: {_memory_fraction(given):g} of what is free on {device} "
        f"({format_bytes(memory)}) does not hold the parameters of a server "
        f"({format_bytes(parameter_bytes)}), and it has to hold the KV cache, too; "
        "a larger share or sglang.tp_size holds them"
    )


def _largest_fraction(plan: Plan, place: str) -> float | None:
    """The share that each server on a device may take, all else staying; None without servers.

    0: not even their parameters have room.
    """
    memory = plan.available_bytes.get(place)
    servers = [w for w in plan.workers if w.role == "server" and w.device == place]
    if place == HOST or not servers or memory is None:
        return None
    used = sum(server.memory[place] for server in servers)
    free = memory - (plan.needed_bytes[place] - used)
    steps = min(_FRACTION_STEPS // len(servers), _FRACTION_STEPS - 1)
    if steps * free < _FRACTION_STEPS * max(server.parameter_bytes for server in servers):
        return 0.0
    return steps / _FRACTION_STEPS
