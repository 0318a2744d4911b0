"""Copies to a device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_ALIGNMENT = 16
"""Bytes; at least the size of an element of any type."""


def to_device(tensors: Mapping[str, torch.Tensor], device: torch.device) -> dict[str, Any]:
    """The tensors on a device, by their names; on the CPU they are themselves returned.

    A copy from ordinary memory would hold up the host until the device has done all that was
    asked of it before. So they go into pinned memory, one after the other, and over in one copy.

    Args:
        tensors: on the CPU.
    """
    if device.type == "cpu":
        return dict(tensors)
    starts, size = dict[str, int](), 0
    for name, tensor in tensors.items():
        starts[name] = size
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    sent = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for name, tensor in tensors.items():
        target = sent[starts[name] : starts[name] + tensor.nbytes]
        target.copy_(tensor.contiguous().view(-1).view(torch.uint8))
    received = sent.to(device, non_blocking=True)
    return {
        name: received[starts[name] : starts[name] + tensor.nbytes]
        .view(tensor.dtype)
        .view(tensor.shape)
        for name, tensor in tensors.items()
    }
