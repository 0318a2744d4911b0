"""AdamW over this rank's shards, its learning rate schedule, and clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from areal_sc.config.schema import LrSchedule, OptimizerConfig
from areal_sc.engines.fsdp.process_group import ProcessGroup
from areal_sc.errors import ConfigError


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of training step `step`, counted from 0.

    It rises in equal steps to `lr` over the first `warmup_steps`, and then stays, or falls along
    a line or half a cosine to `lr * min_lr_ratio`, reached after `total_steps`.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == LrSchedule.linear:
        remaining = 1 - progress
    elif config.schedule == LrSchedule.cosine:
        remaining = (1 + math.cos(math.pi * progress)) / 2
    else:
        return config.lr
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * remaining)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a distributed tensor (it may be empty), or the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_row(tensor: torch.Tensor) -> int:
    """Of this rank's shard. Each rank has as many rows as those before it, or what is left."""
    if not isinstance(tensor, DTensor):
        return 0
    num_rows, mesh = len(tensor), tensor.device_mesh
    return min(num_rows, mesh.get_local_rank() * -(-num_rows // mesh.size()))


class ShardedAdamW:
    """AdamW is elementwise, so each rank updates its own shards as plain tensors.

    All memory that training always needs is taken at once, so that a server that shares the device,
    and starts later, measures what is really left.

    Attributes:
        num_updates: optimizer updates so far.
    Raises: ConfigError: the learning rate falls, and nothing says over how many steps.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, group: ProcessGroup
    ) -> None:
        if config.schedule != LrSchedule.constant and config.total_steps < 1:
            raise ConfigError(
                f"optimizer.total_steps: expected at least 1 with schedule={config.schedule}, "
                f"got {config.total_steps}"
            )
        self.config = config
        self.num_updates = 0
        self._group = group
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        # Same storage as the model's parameters: stepping these updates the model.
        self._shards = {
            name: nn.Parameter(local_part(parameter).detach())
            for name, parameter in self._parameters.items()
        }
        self._adamw = torch.optim.AdamW(
            [shard for shard in self._shards.values() if shard.numel()],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for shard in self._shards.values():  # as AdamW would at its first step
            self._adamw.state[shard] = {
                "step": torch.zeros((), dtype=torch.float32, device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        if group.device.type == "cuda":
            # The caching allocator keeps what is freed, for the gradients.
            _ = [torch.empty_like(shard) for shard in self._shards.values()]

    def update(self, step: int) -> float:
        """Clips the accumulated gradients and takes one step; the gradients are gone afterwards.

        Returns: the global gradient norm before clipping. Where it is not finite, no step is
            taken, so that the weights survive.
        """
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            self._shards[name].grad = None if gradient is None else local_part(gradient)
            parameter.grad = None
        norm = self._clip()
        if math.isfinite(norm):
            for settings in self._adamw.param_groups:
                settings["lr"] = learning_rate(self.config, step)
            self._adamw.step()
            self.num_updates += 1
        self._adamw.zero_grad()
        return norm

    def _clip(self) -> float:
        """Scales all gradients so that their global norm is at most `max_grad_norm` (0: never)."""
        gradients = [
            shard.grad
            for shard in self._shards.values()
            if shard.grad is not None and shard.numel()
        ]
        squares = torch.zeros((), dtype=torch.float64, device=self._group.device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients))
            squares = norms.double().square().sum()
        norm = math.sqrt(float(self._group.sum(squares)))
        limit = self.config.max_grad_norm
        if limit > 0 and norm > limit and math.isfinite(norm):
            torch._foreach_mul_(gradients, limit / norm)
        return norm

    def moments(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name -> the live AdamW state of this rank's shard: `exp_avg`, `exp_avg_sq`, `step`."""
        return {name: self._adamw.state[shard] for name, shard in self._shards.items()}
