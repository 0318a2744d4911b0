"""Lets Megatron-core compute on a CPU, so that tests can run it; never for anything else.

It asks for CUDA devices in many places. `install` gives it CPU tensors there, for the whole
process: torch's own functions are changed, so no process that has a GPU may do so.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils._device import _device_constructors

_FACTORIES = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")
_CPU = torch.device("cpu")


def _on_cpu(make: Any) -> Any:
    """The function, whose `device` is the CPU where it would be CUDA."""

    @functools.wraps(make)
    def made(*args: Any, **settings: Any) -> torch.Tensor:
        if str(settings.get("device")).startswith("cuda"):
            settings["device"] = _CPU
        return make(*args, **settings)

    return made


def install() -> None:
    assert not torch.cuda.is_available(), "Megatron-core computes on the GPU of this machine"
    _device_constructors()  # `with torch.device` works on the functions that it finds first
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    type_of = torch.Tensor.type

    def cuda_type(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        found = type_of(tensor, *args, **settings)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = cuda_type  # type: ignore[method-assign]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign,assignment]
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.manual_seed = lambda _: None
    torch.cuda.get_rng_state = lambda *_: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda *_: None  # type: ignore[assignment]

    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils

    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *_, **__: None
    moe_utils.te_general_gemm = None  # it is named there also without TransformerEngine
