"""Muon as the optimizer of a run, in place of AdamW.

    python examples/minimal.py --config configs/minimal.yaml actor.optimizer.type=muon:Muon

The matrices of the layers go by Muon (kellerjordan.github.io/posts/muon): their momentum is made
orthogonal before it moves them. Embeddings, output layer, norms and biases go by Adam.
"""

from __future__ import annotations

import math
from typing import Any

import torch

MOMENTUM = 0.95
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class Muon(torch.optim.Optimizer):
    """Updates have the size that Adam's have, so that Adam's learning rate does for both."""

    needs_whole_parameters = True
    """Ranks that have a part of each matrix are refused."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(
            groups, {"lr": 0.0, "betas": (0.9, 0.999), "eps": 0.0, "weight_decay": 0.0}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is None:
                    continue
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                is_hidden = weight.dim() == 2 and ".layers." in name
                update = self._orthogonal(weight) if is_hidden else self._adam(weight, group)
                weight.sub_(update, alpha=group["lr"])

    def _orthogonal(self, weight: torch.Tensor) -> torch.Tensor:
        state = self.state[weight]
        momentum = state.setdefault("momentum", torch.zeros_like(weight))
        momentum.lerp_(weight.grad, 1 - MOMENTUM)
        update = weight.grad.lerp(momentum, MOMENTUM)
        return orthogonal(update) * (0.2 * math.sqrt(max(weight.shape)))

    def _adam(self, weight: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state, (beta1, beta2) = self.state[weight], group["betas"]
        mean = state.setdefault("mean", torch.zeros_like(weight))
        square = state.setdefault("square", torch.zeros_like(weight))
        number = state.setdefault("step", torch.zeros((), device=weight.device))
        number += 1
        mean.lerp_(weight.grad, 1 - beta1)
        square.lerp_(weight.grad.square(), 1 - beta2)
        return (mean / (1 - beta1**number)) / ((square / (1 - beta2**number)).sqrt() + group["eps"])


def orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    """Nearly the orthogonal factor of a matrix, by five steps of Newton and Schulz."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.bfloat16().T if is_tall else matrix.bfloat16()
    found = found / found.norm().clamp(min=1e-7)
    for _ in range(5):
        square = found @ found.T
        found = a * found + (b * square + c * square @ square) @ found
    return (found.T if is_tall else found).to(matrix.dtype)
