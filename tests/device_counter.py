"""Counts what a device would be asked for: kernels, host syncs, copies that block, and bytes.

It works over the pretended device (`pretended_device.install` comes first), so a CPU can tell what
a GPU would have to do, though not how long it takes. A kernel is an operation that computes or
moves values of the device; views and memory that is only taken are none. The host waits for the
device where it has to know a value or a size, and where it copies from or to memory that is not
pinned.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from pretended_device import DEVICE_TYPE, is_pinned
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_NO_KERNELS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach")
_NO_KERNELS += ("set_", "_unsafe_view", "lift_fresh", "is_same_size", "resize_", "record_stream")
_COPIES = ("copy_", "_to_copy", "_foreach_copy_")
_SYNCS = ("nonzero", "_local_scalar_dense", "masked_select", "is_nonzero", "equal", "bincount")
_SYNCS += ("_unique", "_unique2", "unique_dim", "unique_consecutive")
_BY_MASK = ("index", "index_put", "index_put_", "_index_put_impl_")


@dataclass
class DeviceCounts:
    """What the device was asked for.

    Attributes:
        kernels: by operation.
        syncs: operations for whose result the host waits, by operation.
        blocking_copies: copies between host and device for which the host waits, by direction.
        copied_bytes: of all copies between host and device.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)
    blocking_copies: Counter[str] = field(default_factory=Counter)
    copied_bytes: int = 0

    @property
    def num_kernels(self) -> int:
        return self.kernels.total()


class DeviceCounter(TorchDispatchMode):
    """Counts while it is entered, in this thread and in backward passes that begin here."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = DeviceCounts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # they call it again with what they are made of
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        given = [it for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
        sources = [_place(it) for it in given]
        result = func(*args, **kwargs)
        if name in _COPIES and self._note_copies(name, args, kwargs, result):
            return result
        found = [it for it in tree_leaves(result) if isinstance(it, torch.Tensor)]
        if DEVICE_TYPE not in [*sources, *map(_place, found)]:
            return result
        if name in _SYNCS or (name in _BY_MASK and _has_mask(args[1])):
            self.counts.syncs[name] += 1
        if name == "repeat_interleave" and kwargs.get("output_size") is None:
            self.counts.syncs[name] += 1
        if not func.is_view and name not in _NO_KERNELS:
            self.counts.kernels[name] += 1
        return result

    def _note_copies(self, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Whether these are copies between host and device."""
        if name == "_to_copy":
            pairs, is_late = [(args[0], result)], kwargs.get("non_blocking", False)
        else:
            position = dict(enumerate(args)).get(2, False)
            is_late = kwargs.get("non_blocking", position)
            targets, sources = args[:2]
            both = zip(targets, sources, strict=True) if name != "copy_" else [(targets, sources)]
            pairs = [(source, target) for target, source in both]
        crossing = [pair for pair in pairs if _place(pair[0]) != _place(pair[1])]
        for source, target in crossing:
            host = source if _place(source) == "cpu" else target
            self.counts.copied_bytes += target.nbytes
            if not (is_late and is_pinned(host)):
                self.counts.blocking_copies[f"{_place(source)} to {_place(target)}"] += 1
        return bool(crossing)


def _place(tensor: torch.Tensor) -> str:
    return tensor.device.type


def _has_mask(indices: Any) -> bool:
    return any(it is not None and it.dtype in (torch.bool, torch.uint8) for it in indices)
