"""Which workers a run would start, where, and about how much memory they need (`--dry-run`).

It also says how training and generation may share the GPUs of this machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from areal_sc.algorithms.named_loss import loss_of
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.placement import Purpose
from areal_sc.config.schema import (
    ActorConfig,
    Device,
    GRPOConfig,
    WeightUpdateMethod,
    further_models,
)
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.engines.handle_base import GeneratorHandle, TrainHandle
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError, ModelError
from areal_sc.nodes.spec import ROLLOUT_ROLE, TRAIN_ROLE, NodeFacts, WorkerOrder
from areal_sc.schedulers.base import Node, placed
from areal_sc.sizing.machine import Machine, this_machine
from areal_sc.sizing.model_context import known_shape
from areal_sc.sizing.model_folder import ModelShape
from areal_sc.sizing.store_room import top_tokens_bytes
from areal_sc.sizing.worker_plan import HOST, RunPlan, WorkerPlan, format_bytes

_LESS: Final = {
    "activations": (
        ": a smaller actor.max_tokens_per_micro_batch, and "
        "actor.activation_checkpointing=layers, need less"
    ),
    "KV cache": ": at most rollout.max_running_sequences rows of rollout.max_context_tokens",
    "store up to": ": rows of two steps more than rollout.max_staleness, or versions of weights",
    "snapshots": ": checkpoint.memory_snapshots=false needs a third of it",
}
"""What the larger parts follow from."""

_OFFLOADED: Final = ("parameters", "optimizer")


@dataclass(frozen=True)
class PlannedNode:
    """A machine that workers may get.

    Attributes:
        name: for messages; "": this machine.
    """

    name: str
    machine: Machine
    purpose: Purpose = Purpose.any


def plan(
    config: GRPOConfig, probe: Callable[[], Machine] = this_machine, *, generates: bool = True
) -> RunPlan:
    """The processes that a run would start on this machine, and an estimate of their memory.

    Arguments and errors are those of `plans`.
    """
    return plans(config, [PlannedNode("", probe())], generates=generates)[""]


def plans(
    config: GRPOConfig, nodes: Sequence[PlannedNode], *, generates: bool = True
) -> dict[str, RunPlan]:
    """The processes that a run would start on each node, by its name, and their memory.

    Args:
        generates: False: it has train workers alone.
    Raises:
        ConfigError: what can be counted beforehand is already more than there is.
        ModelError: the model folder exists and cannot be read.
    """
    results = unchecked_plans(config, nodes, generates=generates)
    for name, result in results.items():
        _check_fits(result, name, make_actor(config.actor), make_generator(config.rollout))
    return results


def plan_ranks(model: ActorConfig) -> list[WorkerPlan]:
    """The ranks of one model, wherever they compute: what they keep does not depend on that.

    Raises: ModelError: the model folder exists and cannot be read.
    """
    handle, shape = make_actor(model), known_shape(model.path) or ModelShape()
    ranks = range(handle.num_workers)
    return [it for rank in ranks for it in handle.plan_worker(rank, shape, ["cpu"], Machine())]


def unchecked_plans(
    config: GRPOConfig, nodes: Sequence[PlannedNode], *, generates: bool = True
) -> dict[str, RunPlan]:
    """The same, whether or not there is as much memory as they need.

    Trainers start first, so generation has the CUDA memory that they leave.

    Raises:
        ConfigError: a worker needs more devices than there are, or its engine refuses a setting.
        ModelError: the model folder exists and cannot be read.
    """
    models = {TRAIN_ROLE: config.actor, **further_models(config)}
    shapes = {role: known_shape(it.path) for role, it in models.items()}
    placed_on = []
    for node in nodes:
        facts = NodeFacts(node.name, node.name, node.machine.num_cuda_devices, "", "", "")
        placed_on.append(Node(facts, Path(), purpose=node.purpose))

    def workers_of(
        role: str,
        handle: TrainHandle | GeneratorHandle,
        shape: ModelShape | None,
        machines: Sequence[Machine],
    ) -> list[list[WorkerPlan]]:
        kind, count = handle.devices
        orders = [
            WorkerOrder(role, index, "", {}, kind, 0, count) for index in range(handle.num_workers)
        ]
        planned = []
        for part, machine in zip(placed(orders, placed_on).values(), machines, strict=True):
            workers: list[WorkerPlan] = []
            for order in part:
                devices = [f"cuda:{device}" for device in order.devices] or ["cpu"]
                workers += handle.plan_worker(order.index, shape or ModelShape(), devices, machine)
            planned.append(workers)
        return planned

    machines = [node.machine for node in nodes]
    trainers = workers_of(TRAIN_ROLE, make_actor(config.actor), shapes[TRAIN_ROLE], machines)
    copies = _bytes_of_copies(config, trainers)
    of_teacher = top_tokens_bytes(config.rollout, loss_of(config.actor.ppo).top_k)
    for role, model in further_models(config).items():
        further = workers_of(role, make_actor(model), shapes[role], machines)
        sealed = of_teacher // model.parallel.num_ranks if role == "teacher" else 0
        for of_node, more in zip(trainers, further, strict=True):
            of_node += [replace(worker, role=role, store_bytes=sealed) for worker in more]
    if not generates:  # then nobody gets weights, as nobody gets those of further models
        trainers = [[replace(it, store_bytes=0) for it in of_node] for of_node in trainers]
    takes_turns = config.rollout.placement is Placement.turns
    beside = machines
    if not takes_turns:
        beside = [_machine_beside(*pair) for pair in zip(trainers, machines, strict=True)]
    generators: list[list[WorkerPlan]] = [[] for _ in nodes]
    if generates:
        generator = make_generator(config.rollout)
        generators = workers_of(ROLLOUT_ROLE, generator, shapes[TRAIN_ROLE], beside)
    for of_node, num_bytes in zip(generators, copies, strict=True):
        of_node[:1] = [replace(it, store_bytes=it.store_bytes + num_bytes) for it in of_node[:1]]
    results = {}
    for node, *workers in zip(nodes, trainers, generators, strict=True):
        available: dict[str, int | None] = {HOST: node.machine.host_memory_bytes}
        memory = enumerate(node.machine.cuda_memory_bytes)
        available |= {f"cuda:{index}": num_bytes for index, num_bytes in memory}
        is_known = all(shape is not None for shape in shapes.values())
        results[node.name] = RunPlan((*workers[0], *workers[1]), available, is_known, takes_turns)
    return results


def _bytes_of_copies(config: GRPOConfig, trainers: Sequence[Sequence[WorkerPlan]]) -> list[int]:
    """What one of the workers of each node keeps of published weights, to be changed.

    It has what the trainers have: two versions, and what differs between them.
    """
    if not config.weight_update.has_changes:
        return [0] * len(trainers)
    on_nodes = [sum(worker.store_bytes for worker in workers) for workers in trainers]
    return [0 if on_node == sum(on_nodes) else sum(on_nodes) for on_node in on_nodes]


def _check_fits(result: RunPlan, node: str, actor: TrainHandle, generator: GeneratorHandle) -> None:
    """Raises: ConfigError."""
    if result.fits:
        return
    way_out = "give it more memory"
    if any(worker.generates for worker in result.workers):
        way_out = generator.way_out(result) or (
            "smaller rollout.max_running_sequences, rollout.max_context_tokens and "
            "rollout.store_bytes need less"
        )
    is_gpu_short = any(place != HOST for place in result.short_places)
    if is_gpu_short and any(w.role == TRAIN_ROLE and w.device != "cpu" for w in result.workers):
        way_out += f"; training needs less on a GPU with {' or '.join(actor.ways_out)}"
    where = f" of {node}" if node else ""
    for place in result.short_places:
        role, what, num_bytes = result.largest_part(place)
        less = _LESS.get(what, "")
        if place == HOST and what in _OFFLOADED and actor.config.cpu_offload:
            less = ": actor.cpu_offload=false keeps them on the GPU"
        where += f"; most of {place} is '{what}' of {role}, {format_bytes(num_bytes)}{less}"
    raise ConfigError(
        f"the run does not fit into memory{where}; {way_out}\n" + "\n".join(result.lines())
    )


def _machine_beside(trainers: Sequence[WorkerPlan], machine: Machine) -> Machine:
    """The machine with the CUDA memory that the trainers leave."""
    held = Counter[str]()
    for worker in trainers:
        held[worker.held_place] += worker.held_bytes
    left = (
        None if memory is None else max(0, memory - held[f"cuda:{index}"])
        for index, memory in enumerate(machine.cuda_memory_bytes)
    )
    return replace(machine, cuda_memory_bytes=tuple(left))


_PRICES: Final = {
    Placement.beside: "each side has less memory",
    Placement.turns: "generation stands still while a step is trained",
}
"""What it costs to share a GPU in this way."""


def check_turns(config: GRPOConfig, count_devices: Callable[[], int]) -> None:
    """Whether both sides can take turns.

    Args:
        count_devices: CUDA devices of this machine; asked only if workers run on it.
    Raises: ConfigError: names the setting that has to be another one.
    """
    for role, model in {"actor": config.actor, **further_models(config)}.items():
        if not make_actor(model).can_sleep:
            raise ConfigError(
                f"{role}.engine: expected fsdp with placement=turns, since the ranks of others "
                f"cannot give their memory up, got {model.engine}"
            )
    if config.weight_update.method is WeightUpdateMethod.collective:
        raise ConfigError(
            "weight_update.method: expected pull or disk with placement=turns, since a broadcast "
            "needs both sides at one time, got collective"
        )
    if config.rollout.lora.is_named:
        raise ConfigError(
            "actor.lora.places: expected 1 with placement=turns, which gives generation all "
            f"weights in each turn, got {config.rollout.lora.places}"
        )
    if config.rollout.lora.is_published_alone:
        raise ConfigError(
            "actor.lora.publish_merged: expected true with placement=turns, which gives servers "
            "all weights in each turn, got false"
        )
    generator = make_generator(config.rollout)
    is_local = config.scheduler.type == SchedulerType.local
    has_cuda = config.rollout.device is not Device.cpu and (not is_local or count_devices() > 0)
    generator.check_turns(has_cuda=has_cuda, is_here=is_local)
    if config.rollout.autoscale.max:
        generator.check_scaling()


@dataclass(frozen=True)
class PlacementChoice:
    """One way to place both sides.

    Attributes:
        why_not: why it cannot be; "": it can.
    """

    placement: Placement
    why_not: str


def choices(config: GRPOConfig, machine: Machine) -> list[PlacementChoice]:
    """Each way, the one that costs least first; none where the two sides share no GPU anyway.

    Raises: ConfigError, ModelError: as `unchecked_plans`.
    """
    apart = _placed(config, Placement.apart)
    training, generation = unchecked_plans(apart, [PlannedNode("", machine)])[""].needed_by_sides
    shared = sorted((training.keys() & generation.keys()) - {HOST})
    if not shared:
        return []
    return [
        PlacementChoice(Placement.apart, f"both sides need {', '.join(shared)}"),
        *(PlacementChoice(way, _why_not(config, machine, way)) for way in _PRICES),
    ]


def settle_placement(config: GRPOConfig, probe: Callable[[], Machine]) -> list[PlacementChoice]:
    """Replaces `placement: auto` by turns, where nothing else fits; returns what there was.

    Raises: ConfigError: `apart`, and both sides need one GPU; else as `unchecked_plans`.
    """
    devices = config.actor.device, config.rollout.device
    if config.scheduler.type != SchedulerType.local or Device.cpu in devices:
        return []
    machine = probe()
    if machine.num_cuda_devices == 0:
        return []
    try:
        found = choices(config, machine)
    except ModelError:  # a script makes it yet, or a later look tells
        return []
    if found and config.rollout.placement is Placement.apart:
        raise ConfigError(
            f"placement: expected another one than apart, as {found[0].why_not}; with more GPUs, "
            "or fewer rollout workers, they have GPUs of their own"
        )
    if found and config.rollout.placement is Placement.auto:
        _, beside, turns = found
        if beside.why_not and not turns.why_not:
            config.placement = config.rollout.placement = Placement.turns
    return found


def placement_lines(config: GRPOConfig, found: list[PlacementChoice]) -> Iterator[str]:
    """The choices as text, one line each; `*` is what the run takes."""
    taken = config.rollout.placement
    if taken is Placement.auto:  # `settle_placement` has left it, and they share GPUs
        taken = Placement.beside
    for choice in found:
        mark = "*" if choice.placement is taken else " "
        fits = f"no: {choice.why_not}" if choice.why_not else f"yes: {_PRICES[choice.placement]}"
        yield f"placement {mark} {choice.placement:<8}{fits}"


def _placed(config: GRPOConfig, placement: Placement) -> GRPOConfig:
    return replace(
        config, placement=placement, rollout=replace(config.rollout, placement=placement)
    )


def _why_not(config: GRPOConfig, machine: Machine, placement: Placement) -> str:
    """Why both sides cannot share the machine in this way; "": they can."""
    placed = _placed(config, placement)
    try:
        plan(placed, lambda: machine)
        if placement is Placement.turns:
            check_turns(placed, lambda: machine.num_cuda_devices)
    except ConfigError as error:
        return str(error).partition("\n")[0].partition(";")[0]
    return ""
