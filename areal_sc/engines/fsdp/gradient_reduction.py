"""How the gradients of FSDP's units are averaged over the ranks on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter


class InPlaceReduceScatter(ReduceScatter):
    """Averages gradients in the memory that FSDP has copied them to, and gives it back.

    Gloo's own would copy them once more. And FSDP keeps its copy until the next unit has gradients,
    so that a GPU can average while it computes; on the CPU one waits for the other in any case.
    """

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces and scatters gradients; FSDP calls it.

        Args:
            output_tensor: [n] gets this rank's part of the result.
            input_tensor: [ranks * n]; has no memory afterwards.
        """
        dist.all_reduce(input_tensor, op, group=group)  # gloo's reduce_scatter sends as much
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        input_tensor.untyped_storage().resize_(0)
