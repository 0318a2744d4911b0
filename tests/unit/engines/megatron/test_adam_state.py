"""AdamW goes on from a snapshot as if it had never stopped, whichever class computes it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from areal_sc.engines.megatron.adam_state import MOMENTS, make_state, set_num_updates

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


class FusedAdam(torch.optim.Optimizer):
    """Counts as TransformerEngine's: for a group, in which the first update puts the number."""

    def __init__(self, parameters: list[torch.nn.Parameter], **settings: Any) -> None:
        super().__init__(parameters, settings)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if "step" in group:
                group["step"] += 1
            else:
                group["step"] = 1
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                first, second = (self.state[parameter][moment] for moment in MOMENTS)
                first.lerp_(parameter.grad, 1 - beta1)
                second.lerp_(parameter.grad.square(), 1 - beta2)
                scale = math.sqrt(1 - beta2 ** group["step"])
                update = first / (1 - beta1 ** group["step"]) / (second.sqrt() / scale + 1e-8)
                parameter -= group["lr"] * (update + group["weight_decay"] * parameter)


def trained(adam: torch.optim.Optimizer, parameter: torch.nn.Parameter, steps: range) -> None:
    for step in steps:
        parameter.grad = torch.tensor([0.3, -1.0, 0.1 * step], dtype=torch.float64)
        adam.step()


def fresh(kind: Any, values: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(values.clone())
    adam = kind([parameter], **SETTINGS)
    make_state(adam, parameter)
    return adam, parameter


@pytest.mark.parametrize("kind", [torch.optim.AdamW, FusedAdam])
def test_a_new_optimizer_goes_on_where_another_one_was(kind: Any) -> None:
    start = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    expected = torch.nn.Parameter(start.clone())
    trained(torch.optim.AdamW([expected], **SETTINGS), expected, range(5))
    adam, parameter = fresh(kind, start)
    set_num_updates(adam, 0)
    trained(adam, parameter, range(3))
    resumed, goes_on = fresh(kind, parameter.detach())
    for moment in MOMENTS:
        resumed.state[goes_on][moment].copy_(adam.state[parameter][moment])
    set_num_updates(resumed, 3)
    trained(resumed, goes_on, range(3, 5))
    torch.testing.assert_close(goes_on, expected, rtol=1e-7, atol=0)
