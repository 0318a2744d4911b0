"""The state of AdamW under Megatron-core: torch's class on a CPU, TransformerEngine's on a GPU.

They keep the moments alike. But torch's counts the updates of each parameter, in its state; and
TransformerEngine's `FusedAdam` those of a group of parameters, from its first update on: before
that, its groups have no count.
"""

from __future__ import annotations

import torch

MOMENTS = ("exp_avg", "exp_avg_sq")


def make_state(adam: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    """The state of a parameter as before the first update; live."""
    state: dict[str, torch.Tensor] = adam.state[parameter]
    state |= {moment: torch.zeros_like(parameter) for moment in MOMENTS}
    if isinstance(adam, torch.optim.AdamW):
        state["step"] = torch.zeros((), dtype=torch.float32)
    return state


def set_num_updates(adam: torch.optim.Optimizer, number: int) -> None:
    """Sets the number of updates done: the next one corrects the bias of the moments for it."""
    if isinstance(adam, torch.optim.AdamW):
        for state in adam.state.values():
            state["step"].fill_(number)
    else:
        for group in adam.param_groups:
            group["step"] = number
