"""Which workers a run would start, where, and about how much memory they need (`--dry-run`).

SGLang takes a share of each GPU for parameters and KV cache together, `mem_fraction_static`,
whatever it needs. It is a share of the memory that is free when a server starts. Trainers start
before, so it is a share of what they leave. The rest is for what both need in a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from areal_sc.config.checks import resolved_device
from areal_sc.config.machine import Machine, this_machine
from areal_sc.config.model_folder import ModelShape, read_model_shape
from areal_sc.config.placement import DevicePlacement, rollout_devices
from areal_sc.config.schema import (
    ActorConfig,
    Device,
    Dtype,
    GRPOConfig,
    RolloutConfig,
    RolloutEngine,
)
from areal_sc.config.sglang_arguments import ServerPlace, server_arguments
from areal_sc.config.sglang_checks import sglang_of_worker
from areal_sc.config.store_room import max_group_bytes
from areal_sc.errors import ConfigError

HOST = "host"

PROCESS_BYTES = 256 << 20
"""Host memory of a worker that has imported torch and transformers: measured 246 MiB, of which a
process forked after the imports shares more than half."""

FLOAT32_BYTES = 4
ADAM_STATES = 2
DTYPE_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}

LIVE_WEIGHT_VERSIONS = 2
"""Published weights: the newest, and the one before while it is still being pulled."""

SGLANG_MEMORY_FRACTION = 0.88
"""About what SGLang takes of a GPU by itself; it reserves more on small cards."""

FRACTION_STEPS = 100
"""`mem_fraction_static` is proposed in hundredths."""


@dataclass(frozen=True)
class WorkerPlan:
    """One process and its estimated memory, in bytes.

    Attributes:
        role: `train`, `rollout`, or `server` for one rank of an SGLang server.
        device: `cpu`, or `cuda:<n>`, numbered as this process sees them.
        parameter_bytes: parameters, and their gradients where they are trained.
        optimizer_bytes: optimizer state.
        kv_bytes: KV cache when every slot is filled to the longest context; of an SGLang server
            all that it takes for it beforehand.
        store_bytes: most that the worker's tensor store holds; always in host memory.
    """

    role: str
    index: int
    device: str
    parameter_bytes: int
    optimizer_bytes: int
    kv_bytes: int
    store_bytes: int

    @property
    def memory(self) -> dict[str, int]:
        """Bytes needed by place: `host`, or the name of a CUDA device."""
        place = HOST if self.device == "cpu" else self.device
        needed = Counter({HOST: self.store_bytes + PROCESS_BYTES})
        needed[place] += self.parameter_bytes + self.optimizer_bytes + self.kv_bytes
        return dict(needed)


@dataclass(frozen=True)
class Plan:
    """The workers of a run and the memory that they are going to share.

    Attributes:
        available_bytes: memory of each place; None where it is unknown.
        is_model_known: False when there is no model at `actor.path` yet, so that parameters and
            KV cache are counted as 0.
    """

    workers: tuple[WorkerPlan, ...]
    available_bytes: dict[str, int | None]
    is_model_known: bool

    @property
    def needed_bytes(self) -> dict[str, int]:
        """Bytes needed by place, all workers together."""
        needed: Counter[str] = Counter()
        for worker in self.workers:
            needed.update(worker.memory)
        return dict(needed)

    @property
    def fits(self) -> bool:
        return not self.short_places

    @property
    def short_places(self) -> list[str]:
        """Places whose known memory is less than what is needed."""
        short = []
        for place, needed in self.needed_bytes.items():
            available = self.available_bytes.get(place)
            if available is not None and needed > available:
                short.append(place)
        return short

    def lines(self) -> list[str]:
        """The plan as text, one line a worker and one a place."""
        header = ("worker", "device", "parameters", "optimizer", "KV cache", "store up to")
        table = [
            (
                f"{worker.role}/{worker.index}",
                worker.device,
                *map(
                    format_bytes,
                    (
                        worker.parameter_bytes,
                        worker.optimizer_bytes,
                        worker.kv_bytes,
                        worker.store_bytes,
                    ),
                ),
            )
            for worker in self.workers
        ]
        lines = [
            f"{row[0]:<12}{row[1]:<8}" + "".join(f"{cell:>13}" for cell in row[2:])
            for row in [header, *table]
        ]
        for place, needed in sorted(self.needed_bytes.items()):
            available = self.available_bytes.get(place)
            of = "an unknown amount" if available is None else format_bytes(available)
            short = " TOO LITTLE" if place in self.short_places else ""
            lines.append(f"{place}: needs about {format_bytes(needed)} of {of}{short}")
        lines.append("not counted: activations, and what CUDA and libraries take for themselves")
        if not self.is_model_known:
            lines.append("not counted: the model, which is not there yet")
        return lines


def plan(config: GRPOConfig, probe: Callable[[], Machine] = this_machine) -> Plan:
    """The processes that a run would start on this machine, and an estimate of their memory.

    Raises:
        ConfigError: what can be counted beforehand is already more than there is.
        ModelError: the model folder exists and cannot be read.
    """
    machine = probe()
    shape = read_model_shape(config.actor.path)
    placement = DevicePlacement(machine.num_cuda_devices)
    trainers = list(_train_workers(config.actor, shape, machine, placement))
    left = _machine_beside(trainers, machine)
    workers = [*trainers, *_rollout_workers(config, shape, left, placement)]
    available: dict[str, int | None] = {HOST: machine.host_memory_bytes}
    available |= {f"cuda:{i}": memory for i, memory in enumerate(machine.cuda_memory_bytes)}
    result = Plan(tuple(workers), available, shape is not None)
    if not result.fits:
        raise ConfigError(
            f"the run does not fit into memory; {_way_out(result)}\n" + "\n".join(result.lines())
        )
    return result


def format_bytes(count: int) -> str:
    """`1.5 GiB`, in the largest unit that leaves at least 1."""
    size, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        units.pop(0)
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _train_workers(
    actor: ActorConfig, shape: ModelShape | None, machine: Machine, placement: DevicePlacement
) -> Iterator[WorkerPlan]:
    # FSDP: each rank holds its part of float32 parameters, gradients and optimizer state
    share = -(-(shape.num_parameters or 0) // actor.parallel.num_ranks) if shape else 0
    for index in range(actor.parallel.num_ranks):
        (device,) = _device_names(actor.device, "train", index, 1, machine, placement)
        yield WorkerPlan(
            role="train",
            index=index,
            device=device,
            parameter_bytes=2 * FLOAT32_BYTES * share,
            optimizer_bytes=ADAM_STATES * FLOAT32_BYTES * share,
            kv_bytes=0,
            store_bytes=LIVE_WEIGHT_VERSIONS * DTYPE_BYTES[actor.dtype] * share,
        )


def _machine_beside(trainers: Sequence[WorkerPlan], machine: Machine) -> Machine:
    """The machine with the CUDA memory that the trainers leave."""
    held = Counter[str]()
    for worker in trainers:
        held.update(worker.memory)
    left = (
        None if memory is None else max(0, memory - held[f"cuda:{index}"])
        for index, memory in enumerate(machine.cuda_memory_bytes)
    )
    return replace(machine, cuda_memory_bytes=tuple(left))


def _rollout_workers(
    config: GRPOConfig, shape: ModelShape | None, machine: Machine, placement: DevicePlacement
) -> Iterator[WorkerPlan]:
    rollout = config.rollout
    kind, num_devices = rollout_devices(rollout)
    num_servers = 0
    for index in range(rollout.num_workers):
        devices = _device_names(kind, "rollout", index, num_devices, machine, placement)
        servers: list[WorkerPlan] = []
        parameter_bytes = kv_bytes = 0
        if rollout.engine == RolloutEngine.sglang:
            servers = _server_ranks(rollout, index, num_servers, shape, devices, machine)
            num_servers += len(servers)
        else:
            parameter_bytes = DTYPE_BYTES[rollout.dtype] * _num_parameters(shape)
            num_places = rollout.max_running_sequences * rollout.max_context_tokens
            kv_bytes = num_places * _kv_bytes_per_token(rollout, shape)
        yield WorkerPlan(
            role="rollout",
            index=index,
            # with servers, the worker itself computes nothing
            device="cpu" if rollout.engine == RolloutEngine.sglang else devices[0],
            parameter_bytes=parameter_bytes,
            optimizer_bytes=0,
            kv_bytes=kv_bytes,
            store_bytes=_live_row_bytes(rollout),
        )
        yield from servers


def _server_ranks(
    rollout: RolloutConfig,
    worker: int,
    first: int,
    shape: ModelShape | None,
    worker_devices: Sequence[str],
    machine: Machine,
) -> list[WorkerPlan]:
    """The processes of the servers that one worker starts on what is left of the machine."""
    sglang = sglang_of_worker(rollout.sglang, worker, rollout.num_workers)
    if sglang.urls:
        return []
    is_cuda = worker_devices[0] != "cpu"
    words = server_arguments(rollout, sglang, ServerPlace(0, 0, "", is_cuda))
    given = dict(word.removeprefix("--").split("=", 1) for word in words if "=" in word)
    parameter_bytes = -(-DTYPE_BYTES[rollout.dtype] * _num_parameters(shape) // sglang.tp_size)
    kv_bytes_per_token = -(-_kv_bytes_per_token(rollout, shape) // sglang.tp_size)
    asked_bytes: int | None = None  # of KV cache; None: as much as there is
    if "max-total-tokens" in given:
        asked_bytes = _max_total_tokens(given) * kv_bytes_per_token
    num_ranks = sglang.num_servers * sglang.tp_size
    ranks = []
    for rank, place in enumerate(sglang.devices or range(num_ranks)):
        device, kv_bytes = "cpu", asked_bytes or 0
        if is_cuda:
            device = worker_devices[place]
            memory = machine.cuda_memory_bytes[int(device.removeprefix("cuda:"))]
            if memory is not None:
                left = int(_memory_fraction(given) * memory) - parameter_bytes
                _require_room(left, device, memory, parameter_bytes, given)
                kv_bytes = left if asked_bytes is None else min(left, asked_bytes)
        ranks.append(
            WorkerPlan(
                role="server",
                index=first + rank,
                device=device,
                parameter_bytes=parameter_bytes,
                optimizer_bytes=0,
                kv_bytes=kv_bytes,
                store_bytes=0,
            )
        )
    return ranks


def _max_total_tokens(given: dict[str, str]) -> int:
    """Raises: ConfigError: `sglang.args.max_total_tokens` is no count."""
    text = given["max-total-tokens"]
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"sglang.args.max_total_tokens: expected a count above 0, got {text}")
    return int(text)


def _memory_fraction(given: dict[str, str]) -> float:
    """Raises: ConfigError: `sglang.args.mem_fraction_static` is no share."""
    text = given.get("mem-fraction-static", str(SGLANG_MEMORY_FRACTION))
    try:
        fraction = float(text)
    except ValueError:
        fraction = math.nan
    if not 0 < fraction < 1:
        raise ConfigError(
            f"sglang.args.mem_fraction_static: expected a number above 0 and below 1, got {text}"
        )
    return fraction


def _require_room(
    left: int, device: str, memory: int, parameter_bytes: int, given: dict[str, str]
) -> None:
    """Raises: ConfigError: the share of the device does not even hold the parameters."""
    if left >= 0:
        return
    if parameter_bytes * FRACTION_STEPS > memory * (FRACTION_STEPS - 1):
        raise ConfigError(
            "no value of sglang.args.mem_fraction_static leaves room for the parameters of a "
            f"server ({format_bytes(parameter_bytes)}): what trains on {device} leaves "
            f"{format_bytes(memory)}; more devices, or more actor.parallel.data, need less on "
            "a device"
        )
    raise ConfigError(
        f"sglang.args.mem_fraction_static: {_memory_fraction(given):g} of what is free on {device} "
        f"({format_bytes(memory)}) does not hold the parameters of a server "
        f"({format_bytes(parameter_bytes)}), and it has to hold the KV cache, too; "
        "a larger share or sglang.tp_size holds them"
    )


def _way_out(result: Plan) -> str:
    """What to change so that less memory is needed."""
    sharing = [
        fraction
        for place in result.short_places
        if (fraction := _largest_memory_fraction(result, place)) is not None
    ]
    if not sharing:
        return (
            "smaller rollout.max_running_sequences, rollout.max_context_tokens or "
            "rollout.store_bytes, or more actor.parallel.data, need less on a device"
        )
    largest = min(sharing)
    if largest <= 0:
        return (
            "no value of sglang.args.mem_fraction_static leaves room for what trains on the same "
            "device; more devices, or more actor.parallel.data, need less on a device"
        )
    return (
        f"sglang.args.mem_fraction_static may be at most {largest:g} beside all else on that device"
    )


def _largest_memory_fraction(result: Plan, place: str) -> float | None:
    """The share that each server on a device may take, all else staying; None without servers.

    0: not even their parameters have room.
    """
    memory = result.available_bytes.get(place)
    servers = [w for w in result.workers if w.role == "server" and w.device == place]
    if place == HOST or not servers or memory is None:
        return None
    used = sum(server.memory[place] for server in servers)
    free = memory - (result.needed_bytes[place] - used)
    steps = min(FRACTION_STEPS // len(servers), FRACTION_STEPS - 1)
    if steps * free < FRACTION_STEPS * max(server.parameter_bytes for server in servers):
        return 0.0
    return steps / FRACTION_STEPS


def _num_parameters(shape: ModelShape | None) -> int:
    return (shape.num_parameters or 0) if shape else 0


def _kv_bytes_per_token(rollout: RolloutConfig, shape: ModelShape | None) -> int:
    return DTYPE_BYTES[rollout.dtype] * ((shape.kv_values_per_token or 0) if shape else 0)


def _live_row_bytes(rollout: RolloutConfig) -> int:
    """Most bytes of rows in one store: eta + 1 admitted batches, and the one being trained."""
    live_groups = (rollout.max_staleness + 2) * rollout.train_batch_groups
    share = -(-live_groups * max_group_bytes(rollout) // rollout.num_workers)
    return min(rollout.store_bytes, share)


def _device_names(
    kind: Device,
    role: str,
    index: int,
    count: int,
    machine: Machine,
    placement: DevicePlacement,
) -> list[str]:
    """`cuda:<n>` for each device that the worker gets, or `cpu` alone."""
    if resolved_device(kind, machine.num_cuda_devices) == Device.cpu:
        return ["cpu"]
    return [f"cuda:{device}" for device in placement.place(role, index, count)]
