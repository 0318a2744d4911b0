"""Which workers a run would start, where, and about how much memory they need (`--dry-run`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from areal_sc.config.checks import resolved_device
from areal_sc.config.machine import Machine, this_machine
from areal_sc.config.model_folder import ModelShape, read_model_shape
from areal_sc.config.schema import ActorConfig, Device, Dtype, GRPOConfig, RolloutConfig
from areal_sc.errors import ConfigError
from areal_sc.metadata import TRAJECTORY_BYTES_PER_TOKEN

HOST = "host"

PROCESS_BYTES = 256 << 20
"""Host memory of a worker that has imported torch and transformers: measured 246 MiB, of which a
process forked after the imports shares more than half."""

FLOAT32_BYTES = 4
ADAM_STATES = 2
DTYPE_BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}

LIVE_WEIGHT_VERSIONS = 2
"""Published weights: the newest, and the one before while it is still being pulled."""


@dataclass(frozen=True)
class WorkerPlan:
    """One process and its estimated memory, in bytes.

    Attributes:
        device: `cpu`, or `cuda:<n>`, numbered as this process sees them.
        parameter_bytes: parameters, and their gradients where they are trained.
        optimizer_bytes: optimizer state.
        kv_bytes: KV cache when every slot is filled to the longest context.
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
    workers = [
        *_train_workers(config.actor, shape, machine),
        *_rollout_workers(config, shape, machine),
    ]
    available: dict[str, int | None] = {HOST: machine.host_memory_bytes}
    available |= {f"cuda:{i}": memory for i, memory in enumerate(machine.cuda_memory_bytes)}
    result = Plan(tuple(workers), available, shape is not None)
    if not result.fits:
        raise ConfigError(
            "the run does not fit into memory; smaller rollout.max_running_sequences, "
            "rollout.max_context_tokens or rollout.store_bytes, or more actor.num_workers, "
            "need less on a device\n" + "\n".join(result.lines())
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
    actor: ActorConfig, shape: ModelShape | None, machine: Machine
) -> list[WorkerPlan]:
    # FSDP: each rank holds its part of float32 parameters, gradients and optimizer state
    share = -(-(shape.num_parameters or 0) // actor.num_workers) if shape else 0
    return [
        WorkerPlan(
            role="train",
            index=index,
            device=_device_name(actor.device, index, machine),
            parameter_bytes=2 * FLOAT32_BYTES * share,
            optimizer_bytes=ADAM_STATES * FLOAT32_BYTES * share,
            kv_bytes=0,
            store_bytes=LIVE_WEIGHT_VERSIONS * DTYPE_BYTES[actor.dtype] * share,
        )
        for index in range(actor.num_workers)
    ]


def _rollout_workers(
    config: GRPOConfig, shape: ModelShape | None, machine: Machine
) -> list[WorkerPlan]:
    rollout = config.rollout
    value_bytes = DTYPE_BYTES[rollout.dtype]
    num_parameters = (shape.num_parameters or 0) if shape else 0
    kv_values = (shape.kv_values_per_token or 0) if shape else 0
    return [
        WorkerPlan(
            role="rollout",
            index=index,
            device=_device_name(rollout.device, config.actor.num_workers + index, machine),
            parameter_bytes=value_bytes * num_parameters,
            optimizer_bytes=0,
            kv_bytes=value_bytes
            * kv_values
            * rollout.max_running_sequences
            * rollout.max_context_tokens,
            store_bytes=_live_row_bytes(rollout),
        )
        for index in range(rollout.num_workers)
    ]


def _live_row_bytes(rollout: RolloutConfig) -> int:
    """Most bytes of rows in one store: eta + 1 admitted batches, and the one being trained."""
    live_groups = (rollout.max_staleness + 2) * rollout.train_batch_groups
    tokens = live_groups * rollout.group_size * rollout.max_context_tokens
    share = -(-tokens * TRAJECTORY_BYTES_PER_TOKEN // rollout.num_workers)
    return min(rollout.store_bytes, share)


def _device_name(device: Device, position: int, machine: Machine) -> str:
    """Workers take the CUDA devices in turn, training first, and share them where they must."""
    if resolved_device(device, machine.num_cuda_devices) == Device.cpu:
        return "cpu"
    return f"cuda:{position % machine.num_cuda_devices}"
