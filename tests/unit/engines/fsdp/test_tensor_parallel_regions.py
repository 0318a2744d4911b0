"""What a region of tensor parallelism keeps, on one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from areal_sc.engines.fsdp.tensor_regions import Entry
from areal_sc.engines.training.process_group import ProcessGroup


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield ProcessGroup(0, 1, torch.device("cpu"))
    dist.destroy_process_group()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(hidden) * self.gate(hidden))


def test_nothing_is_kept_of_a_forward_that_backward_computes_again(group: ProcessGroup) -> None:
    """It stops at the last tensor that is saved, before the hook at the region's end."""
    layer, entry = Layer(), Entry(group)
    layer.register_forward_hook(entry.leave)
    for linear in (layer.up, layer.gate):
        linear.register_forward_pre_hook(entry)
    inputs = torch.randn(3, 4, requires_grad=True)
    output = checkpoint(layer, inputs * 2, use_reentrant=False)
    assert entry._entered is None
    output.sum().backward()
    assert entry._entered is None
    assert inputs.grad is not None
