"""The optimizer over this rank's shards, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from areal_sc.config.optimizer_settings import OptimizerConfig
from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.optimizer_kinds import (
    ParameterGroup,
    fill_state,
    make_optimizer,
    needs_whole_parameters,
)
from areal_sc.engines.loss_scale import LossScale
from areal_sc.engines.training.adapters.lora import adapter_place
from areal_sc.engines.training.learning_rate import check_schedule, learning_rate
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ConfigError


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor (it may be empty), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer:
    """AdamW is elementwise, so each rank updates its own shards as plain tensors; any other
    optimizer that the settings name has to be, too, where ranks have shards.

    All memory that training always needs is taken at once, so that a server that shares the device,
    and starts later, measures what is really left.

    Weights decay, norms and biases do not: what has one dimension only.

    Each place, of adapters beside each other, has settings, a norm and counts of updates of its
    own: it steps, or not, whatever becomes of the others. All that is no adapter's is of place 0.

    Args:
        parameters: by the names that `parts` knows them by.
        parts: this rank's.
        world: all ranks.
        tensor: ranks that have a cut of every parameter each.
        loss_scale: of the first update; None: losses are not scaled.

    Attributes:
        world: as given.
        num_updates: optimizer updates so far.
        loss_scale: factor of the gradients that the next update expects.
    Raises: ConfigError: the learning rate falls, and nothing says over how many steps; or as
        `make_optimizer` and `fill_state`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        parts: CutParts,
        world: ProcessGroup,
        tensor: ProcessGroup,
        loss_scale: LossScale | None = None,
    ) -> None:
        check_schedule(config)
        self.loss_scale = loss_scale
        self.config = config
        self.num_updates = 0
        self._parts = parts
        self.world = world
        self._tensor = tensor
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        # Same storage as the model's parameters: stepping these updates the model.
        self._shards = {
            name: nn.Parameter(local_part(parameter).detach())
            for name, parameter in self._parameters.items()
        }
        held = {name: shard for name, shard in self._shards.items() if shard.numel()}
        is_weight = {name: len(parts.cuts[name].shape) > 1 for name in held}
        self._places = {name: adapter_place(name) or 0 for name in self._shards}
        self._numbers = sorted({0, *self._places.values()})
        groups = list[ParameterGroup]()
        for place, decays in product(self._numbers, (True, False)):
            names = [n for n in held if is_weight[n] is decays and self._places[n] == place]
            params = [held[name] for name in names]
            groups.append({"params": params, "names": names, "is_matrix": decays, "place": place})
        self._optimizer = make_optimizer(config, groups)
        if world.size > 1 and needs_whole_parameters(self._optimizer):
            raise ConfigError(
                f"actor.optimizer.type: {config.type} needs whole parameters, and "
                f"{world.size} ranks have parts of them: set actor.parallel.data=1, tensor=1 and "
                "sequence=1"
            )
        fill_state(config, self._optimizer, self._shards)
        # The caching allocator keeps what is freed, for the gradients.
        _ = [torch.empty_like(shard) for shard in self._shards.values() if shard.is_cuda]

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """What it holds beside parameters and gradients."""
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def update(
        self,
        step: int,
        configs: Mapping[int, OptimizerConfig] | None = None,
        *,
        is_void: bool = False,
    ) -> dict[int, float]:
        """Clips the accumulated gradients and takes one step; the gradients are gone afterwards.

        Args:
            configs: of this step, by place, of those that may step; None: as given, of all places.
            is_void: this rank's gradients do not count: the norms are NaN on all ranks.
        Returns: by place, the global gradient norm before clipping, of the loss itself. Where it is
            not finite, no step is taken, so that the weights survive; nor where it is 0, so that
            neither momentum nor decay moves them.
        """
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            self._shards[name].grad = None if gradient is None else local_part(gradient)
            parameter.grad = None
        self._add_up_partial_gradients()
        configs = configs or dict.fromkeys(self._numbers, self.config)
        norms = self._clip(configs, is_void=is_void)
        stepping = {place for place, norm in norms.items() if norm != 0 and math.isfinite(norm)}
        if stepping:
            for name, shard in self._shards.items():
                if self._places[name] not in stepping:
                    shard.grad = None
            for settings in self._optimizer.param_groups:
                if settings["place"] not in stepping:
                    continue
                config = configs[settings["place"]]
                values = {
                    "lr": learning_rate(config, step),
                    "betas": (config.beta1, config.beta2),
                    "eps": config.eps,
                    "weight_decay": config.weight_decay if settings["is_matrix"] else 0.0,
                }
                settings |= {key: value for key, value in values.items() if key in settings}
            self._optimizer.step()
            self.num_updates += 1
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(norms[0])  # there is one place
        self._optimizer.zero_grad()
        return norms

    def _add_up_partial_gradients(self) -> None:
        """Ranks that have copies of a parameter, and parts of its gradient, get the whole one."""
        if self._tensor.size == 1:
            return
        names = [n for n in self._shards if self._parts.cuts[n].has_partial_gradients]
        rooms = []
        for name in names:
            # one row for each box that there is, of which this rank fills its own
            boxes = self._parts.cuts[name].boxes
            shard = self._shards[name]
            room = torch.zeros(len(set(boxes)), shard.numel(), device=shard.device)
            if shard.grad is not None:
                room[_number_of(boxes, self._tensor.rank)] = shard.grad.flatten()
            rooms.append(room)
        if not rooms:
            return
        summed = self._tensor.sum(torch.cat([room.flatten() for room in rooms]))
        for name, flat in zip(
            names, torch.split(summed, [room.numel() for room in rooms]), strict=True
        ):
            shard = self._shards[name]
            if shard.grad is not None:
                boxes = self._parts.cuts[name].boxes
                own = flat.view(-1, shard.numel())[_number_of(boxes, self._tensor.rank)]
                shard.grad.copy_(own.view_as(shard))

    def _clip(self, configs: Mapping[int, OptimizerConfig], *, is_void: bool) -> dict[int, float]:
        """Takes the scale of the loss off all gradients, and shortens those of each place so that
        their global norm is at most its `max_grad_norm` (0: never); returns the norms."""
        gradients: dict[int, list[torch.Tensor]] = {place: [] for place in configs}
        counted: dict[int, list[torch.Tensor]] = {place: [] for place in configs}
        for name, shard in self._shards.items():
            place = self._places[name]
            if shard.grad is not None and shard.numel() and place in configs:
                gradients[place].append(shard.grad)
                if self._parts.is_first(name):
                    counted[place].append(shard.grad)
        squares = torch.zeros(len(configs), dtype=torch.float64, device=self.world.device)
        for square, of_place in zip(squares, counted.values(), strict=True):
            if of_place:
                norms = torch.stack(torch._foreach_norm(of_place))
                square.copy_(norms.double().square().sum())
        if is_void:
            squares.fill_(math.nan)
        scale = 1.0 if self.loss_scale is None else 1 / self.loss_scale.value
        found = dict[int, float]()
        for place, square in zip(configs, self.world.sum(squares), strict=True):
            found[place] = norm = math.sqrt(float(square)) * scale
            limit, factor = configs[place].max_grad_norm, scale
            if limit > 0 and norm > limit:
                factor *= limit / norm
            if gradients[place] and factor != 1 and math.isfinite(norm):
                torch._foreach_mul_(gradients[place], factor)
        return found

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name -> the live state of this rank's shard; of AdamW `exp_avg`, `exp_avg_sq`, `step`."""
        return {name: self._optimizer.state[shard] for name, shard in self._shards.items()}


def _number_of(boxes: Sequence[Box], rank: int) -> int:
    """Number of a rank's box among the distinct boxes, in the order in which they first appear."""
    return list(dict.fromkeys(boxes)).index(boxes[rank])
