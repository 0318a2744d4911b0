"""How training and generation share the GPUs of this machine: what fits, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

from areal_sc.config.further_models import further_models
from areal_sc.config.parallel_settings import Placement
from areal_sc.config.schema import Device, GRPOConfig, WeightUpdateMethod
from areal_sc.config.slurm_settings import SchedulerType
from areal_sc.engines.handles import make_actor, make_generator
from areal_sc.errors import ConfigError, ModelError
from areal_sc.preflight.plan import PlannedNode, plan, unchecked_plans
from areal_sc.sizing.machine import Machine

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
    shared = unchecked_plans(apart, [PlannedNode("", machine)])[""].shared_places
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
