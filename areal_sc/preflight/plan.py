"""Which workers a run would start, where, and about how much memory they need (`--dry-run`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from areal_sc.config.machine import Machine, resolved_device, this_machine
from areal_sc.config.model_folder import ModelShape, read_model_shape
from areal_sc.config.placement import DevicePlacement
from areal_sc.config.schema import Device, GRPOConfig
from areal_sc.config.worker_plan import HOST, Plan, WorkerPlan
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError
from areal_sc.hub import cached_model


def plan(config: GRPOConfig, probe: Callable[[], Machine] = this_machine) -> Plan:
    """The processes that a run would start on this machine, and an estimate of their memory.

    Trainers start first, so generation has the CUDA memory that they leave.

    Raises:
        ConfigError: what can be counted beforehand is already more than there is.
        ModelError: the model folder exists and cannot be read.
    """
    machine = probe()
    folder = cached_model(config.actor.path, config.actor.revision)
    shape = read_model_shape(folder) if folder else None
    placement = DevicePlacement(machine.num_cuda_devices)

    def workers_of(
        role: str, handle: TrainHandle | GeneratorHandle, beside: Machine
    ) -> list[WorkerPlan]:
        kind, count = handle.devices
        workers = []
        for index in range(handle.num_workers):
            devices = ["cpu"]
            if resolved_device(kind, machine.num_cuda_devices) == Device.cuda:
                devices = [f"cuda:{device}" for device in placement.place(role, index, count)]
            workers += handle.plan_worker(index, shape or ModelShape(), devices, beside)
        return workers

    trainers = workers_of("train", make_actor(config.actor), machine)
    generator = make_generator(config.rollout)
    generators = workers_of("rollout", generator, _machine_beside(trainers, machine))
    available: dict[str, int | None] = {HOST: machine.host_memory_bytes}
    available |= {f"cuda:{i}": memory for i, memory in enumerate(machine.cuda_memory_bytes)}
    result = Plan((*trainers, *generators), available, shape is not None)
    if not result.fits:
        way_out = generator.way_out(result) or (
            "smaller rollout.max_running_sequences, rollout.max_context_tokens or "
            "rollout.store_bytes, or more actor.parallel.data, need less on a device"
        )
        raise ConfigError(
            f"the run does not fit into memory; {way_out}\n" + "\n".join(result.lines())
        )
    return result


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
