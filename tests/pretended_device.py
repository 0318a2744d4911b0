"""A device for machines without any: its tensors lie in host memory, but do not mix with others.

What is computed with tensors of both is an error, as it is on a GPU; copies from one to the other
are none. So a computation that is right here is right about devices, and its numbers are those of
the CPU. Pinned memory is ordinary memory that is known by its address. Streams, and copies that
overlap with other work, are not pretended.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fsdp_param_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from areal_sc.engines.training import rank_engine

DEVICE_TYPE = "pretended"
_COPIES = (
    torch.ops.aten.copy_.default,
    torch.ops.aten._foreach_copy_.default,
    torch.ops.aten._to_copy.default,
)

_pinned: list[torch.Tensor] = []
"""Pinned memory, which is kept: its addresses would come again."""


def pin(memory: torch.Tensor) -> None:
    """Pins the memory of a tensor on the host, for good."""
    _pinned.append(memory)


def pinned_sizes() -> list[int]:
    """Bytes of each piece of memory that was ever pinned."""
    return [memory.nbytes for memory in _pinned]


def is_pinned(tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    return any(0 <= address - memory.data_ptr() < memory.nbytes for memory in _pinned)


def install() -> None:
    """From now on the engines of this process compute on the device. It cannot be undone."""
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, backend_module=_Backend())
    # These change memory by its address, which a tensor of the device does not have.
    for module, name in (
        (_fsdp_param, "alloc_storage"),
        (_fsdp_param, "free_storage"),
        (_fsdp_param_group, "alloc_storage"),
    ):
        setattr(module, name, _for_real_memory(getattr(module, name)))
    _fsdp_init._move_states_to_device = lambda *_: None  # type: ignore[assignment]
    device = torch.device(DEVICE_TYPE, 0)
    rank_engine.select_device = lambda *_: device  # type: ignore[attr-defined]
    _Everywhere().__enter__()


class OnDevice(torch.Tensor):
    """A tensor of the device.

    Attributes:
        values: its values, on the CPU.
    """

    values: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> OnDevice:
        made: OnDevice = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(DEVICE_TYPE, 0),
        )
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, dict(kwargs or {}))


class _Everywhere(TorchDispatchMode):
    """Sees calls without a tensor among the arguments, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # they call it again with what they are made of
        return _compute(func, args, dict(kwargs or {}))


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if kwargs.pop("pin_memory", False):
        memory = func(*args, **kwargs)
        pin(memory)
        return memory
    tensors = [it for it in tree_leaves((args, kwargs)) if isinstance(it, torch.Tensor)]
    there = {id(it.values): it for it in tensors if isinstance(it, OnDevice)}
    is_mixed = any(it.dim() and not isinstance(it, OnDevice) for it in tensors)
    if there and is_mixed and func not in _COPIES:
        raise RuntimeError(f"{func} of tensors on {[it.device.type for it in tensors]}")
    is_result_there = bool(there)
    if kwargs.get("device") is not None:
        device = torch.device(kwargs["device"])
        is_result_there = device.type == DEVICE_TYPE
        kwargs["device"] = torch.device("cpu") if is_result_there else device

    def result(found: Any) -> Any:
        if id(found) in there:
            return there[id(found)]
        is_own = is_result_there and isinstance(found, torch.Tensor) and not found.is_meta
        return OnDevice(found) if is_own else found

    args, kwargs = tree_map(
        lambda it: it.values if isinstance(it, OnDevice) else it, (args, kwargs)
    )
    if func is torch.ops.aten.histc.default:  # of integers, on a GPU alone
        counts = func(args[0].float(), *args[1:], **kwargs)
        return result(counts.to(args[0].dtype))
    return tree_map(result, func(*args, **kwargs))


def _for_real_memory(change: Any) -> Any:
    return lambda tensor: None if isinstance(tensor, OnDevice) else change(tensor)


class _Stream:
    """Streams and events, on all of which everything is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class _Backend:
    """What torch asks a device's module."""

    Stream = Event = stream = current_stream = _Stream

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed_all(self, seed: int) -> None: ...
