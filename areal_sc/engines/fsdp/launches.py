"""Whether a GPU would wait for the host, which launches the kernels of a layer one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

KERNELS_A_LAYER = 181
"""Of a decoder layer that is not compiled, forward and backward; counted."""

LAUNCH_S = 32.5e-6
"""Seconds of the host for each of them; measured beside an H100, on a virtual machine."""

REACHED_FLOPS = 0.4 * 989e12
"""FLOPs a second of an H100 in such products, in 16 bits."""


def host_is_limit(layers: Sequence[nn.Module], num_tokens: int, device: torch.device) -> bool:
    """Whether a layer's kernels are done before the host has launched the next ones.

    Layers with experts are left out: which kernels they have depends on the model.

    Args:
        num_tokens: of a micro-batch, on this rank.
    """
    if device.type != "cuda" or not layers:
        return False
    parameters = dict(layers[-1].named_parameters())
    if any(".experts." in name for name in parameters):
        return False
    flops = 6 * num_tokens * sum(parameter.numel() for parameter in parameters.values())
    return flops / REACHED_FLOPS < KERNELS_A_LAYER * LAUNCH_S
