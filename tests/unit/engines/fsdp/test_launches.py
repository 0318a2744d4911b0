"""Where a GPU would wait for the host: small layers, few tokens."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from areal_sc.engines.fsdp.launches import host_is_limit

CUDA = torch.device("cuda", 0)


def layer_of(num_parameters: int, name: str = "mlp") -> nn.Module:
    layer = nn.Module()
    part = nn.Linear(num_parameters // 1000, 1000, bias=False, device="meta")
    layer.add_module(name, part)
    return layer


@pytest.mark.parametrize(
    ("num_parameters", "num_tokens", "is_limit"),
    [
        (15_000_000, 8192, True),  # Qwen2.5-0.5B
        (15_000_000, 65_536, False),
        (233_000_000, 8192, False),  # Qwen2.5-7B
        (233_000_000, 512, True),
    ],
)
def test_by_size_and_tokens(num_parameters: int, num_tokens: int, is_limit: bool) -> None:
    layers = [layer_of(num_parameters)] * 2
    assert host_is_limit(layers, num_tokens, CUDA) == is_limit
    assert not host_is_limit(layers, num_tokens, torch.device("cpu"))


def test_layers_with_experts_and_unknown_ones_are_left_alone() -> None:
    layer = nn.Module()
    layer.add_module("mlp", layer_of(1_000_000, "experts"))
    assert not host_is_limit([layer], 100, CUDA)
    assert not host_is_limit([], 100, CUDA)
