"""The optimizer that the settings name, over this rank's shards, with its state from the start on.

One of a user's own is a `torch.optim.Optimizer` that takes parameter groups, as torch's do:

    params      this rank's shards, as plain tensors with gradients; none is empty
    names       of the model's parameters that they are shards of
    is_matrix   whether these have two dimensions or more; only they decay

`lr`, `betas`, `eps` and `weight_decay` of a group are set before each step, where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn

from areal_sc.config.optimizer_settings import ADAMW, OptimizerConfig
from areal_sc.errors import ConfigError
from areal_sc.user_code import named, user_code

ParameterGroup = dict[str, Any]

_KEY: Final = "actor.optimizer.type"


def make_optimizer(config: OptimizerConfig, groups: list[ParameterGroup]) -> torch.optim.Optimizer:
    """The optimizer without any state.

    Raises: ConfigError: there is none of that name. WorkflowError: it raised something.
    """
    if config.type == ADAMW:
        return torch.optim.AdamW(groups, fused=True)
    kind = named(config.type, f"{_KEY}: expected {ADAMW} or package.module:Class")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"{_KEY}: expected a torch.optim.Optimizer, got {config.type!r}")
    make: Callable[[list[ParameterGroup]], torch.optim.Optimizer] = kind
    with user_code(config.type):
        return make(groups)


def needs_whole_parameters(optimizer: torch.optim.Optimizer) -> bool:
    """Whether it says, by an attribute of this name, that shards would not do, as Muon's would
    not."""
    return bool(getattr(optimizer, "needs_whole_parameters", False))


def fill_state(
    config: OptimizerConfig, optimizer: torch.optim.Optimizer, shards: Mapping[str, nn.Parameter]
) -> None:
    """Gives each shard, empty ones too, the state that the first step would give it.

    Raises: ConfigError: a state is no tensor of the parameter's shape, and no single number in one.
        WorkflowError: the optimizer raised something.
    """
    if config.type == ADAMW:
        for shard in shards.values():
            optimizer.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        return
    _take_void_step(config, optimizer)
    for name, shard in shards.items():
        if (
            not shard.numel()
        ):  # the optimizer does not have it: another one tells what it would keep
            stand_in = nn.Parameter(torch.zeros([1] * shard.dim(), device=shard.device))
            group = {"params": [stand_in], "names": [name], "is_matrix": shard.dim() > 1}
            other = make_optimizer(config, [group])
            _take_void_step(config, other)
            optimizer.state[shard] = {
                kind: torch.zeros_like(shard) if value.dim() else value
                for kind, value in other.state[stand_in].items()
            }


def _take_void_step(config: OptimizerConfig, optimizer: torch.optim.Optimizer) -> None:
    """One with gradients of 0, at a rate of 0, whose counters and changes are taken back."""
    shards = [shard for group in optimizer.param_groups for shard in group["params"]]
    before = [shard.detach().clone() for shard in shards]
    with user_code(config.type):
        for group in optimizer.param_groups:
            group |= {key: 0.0 for key in ("lr", "weight_decay") if key in group}
        for shard in shards:
            shard.grad = torch.zeros_like(shard)
        optimizer.step()
        optimizer.zero_grad()
    for shard, values in zip(shards, before, strict=True):
        shard.detach().copy_(values)
    for group in optimizer.param_groups:
        for name, shard in zip(group["names"], group["params"], strict=True):
            for kind, value in optimizer.state[shard].items():
                _check_state(config, name, kind, value, shard)
                if value.dim() == 0:
                    value.zero_()


def _check_state(
    config: OptimizerConfig, name: str, kind: str, value: Any, shard: nn.Parameter
) -> None:
    found = type(value).__name__
    if isinstance(value, torch.Tensor):
        if value.shape in (shard.shape, ()):
            return
        found = f"a tensor of shape {tuple(value.shape)}"
    raise ConfigError(
        f"{_KEY}: {config.type} keeps {kind!r} of {name}, {found}; snapshots hold tensors of the "
        f"parameter's shape, {tuple(shard.shape)}, and single numbers in a tensor"
    )
