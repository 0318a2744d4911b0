from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """Of all that this thread makes, and that is no view, the number of values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        before = [memory_of(it) for it in args if isinstance(it, torch.Tensor)]
        if isinstance(found, torch.Tensor) and memory_of(found) not in before:
            self.count = max(self.count, found.numel())
        return found


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
