"""Copies to a device for which the host does not wait."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

_ALIGNMENT = 16
"""Bytes; at least the size of an element of any type."""


def to_device(tensors: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The tensors on a device, by their names; on the CPU they are themselves returned.

    A copy from ordinary memory would hold up the host until the device has done all that was
    asked of it before. So they go into pinned memory, one after the other, and over in one copy.

    Args:
        tensors: on the CPU; some may be in further dicts.
    """
    if device.type == "cpu":
        return tensors
    given, form = tree_flatten(tensors)
    starts, size = list[int](), 0
    for tensor in given:
        starts.append(size)
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    sent = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    for start, tensor in zip(starts, given, strict=True):
        sent[start : start + tensor.nbytes].copy_(tensor.contiguous().view(-1).view(torch.uint8))
    received = sent.to(device, non_blocking=True)
    found: dict[str, Any] = tree_unflatten(
        [
            received[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in zip(starts, given, strict=True)
        ],
        form,
    )
    return found
