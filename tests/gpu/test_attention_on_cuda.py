"""Each way of packed attention on CUDA, forward and backward, against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from areal_sc.config.schema import Device
from areal_sc.engines.training import packed_attention as subject
from areal_sc.engines.training.packed_attention import PackedLayout, packed_attention

pytestmark = pytest.mark.gpu

LENGTHS = (40, 1, 100, 37, 40, 64)
NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 4, 2, 64

PARENTS = (-1, 0, 0, 2, -1, 2)
"""Of the rows where they are runs: the first one begins four of them."""

CALL_COSTS = {"alone": 0, "buckets": 500_000, "one_bucket": 10**12}
"""Of one call, in multiply-adds: what decides how rows share calls."""


def exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    parents: tuple[int, ...] | None,
) -> torch.Tensor:
    """[1, T, H, D]: masked softmax over all T x T pairs, in float64."""
    repeats = NUM_HEADS // NUM_KEY_HEADS
    key, value = (tensor.repeat_interleave(repeats, 1) for tensor in (key, value))
    row = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    is_on_path = torch.eye(len(LENGTHS), dtype=torch.bool)
    for own, parent in enumerate(parents or ()):
        if parent >= 0:
            is_on_path[own] |= is_on_path[parent]
    num_before = is_on_path.double() @ torch.tensor(LENGTHS).double() - torch.tensor(LENGTHS)
    starts = torch.tensor(LENGTHS).cumsum(0) - torch.tensor(LENGTHS)
    position = torch.arange(query.shape[2]) - starts[row] + num_before[row]
    distance = position[:, None] - position
    is_seen = is_on_path[row][:, row] & (distance >= 0)
    if window is not None:
        is_seen &= distance < window
    scores = query @ key.transpose(-1, -2) * HEAD_DIM**-0.5
    weights = scores.masked_fill(~is_seen, float("-inf")).softmax(-1)
    return (weights @ value).transpose(1, 2)


def inputs(dtype: torch.dtype, device: Device) -> list[torch.Tensor]:
    """Query, key and value of the same values in every dtype (rounded to bfloat16 first)."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, sum(LENGTHS), HEAD_DIM, generator=generator)
        .bfloat16()
        .to(device, dtype)
        .requires_grad_()
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    ]


@pytest.mark.parametrize("parents", [None, PARENTS], ids=["rows", "runs"])
@pytest.mark.parametrize("window", [None, 16], ids=["full", "window"])
@pytest.mark.parametrize(
    ("way", "dtype", "tolerance"),
    [
        *((way, torch.float32, 1e-4) for way in CALL_COSTS),
        *((way, torch.bfloat16, 4e-2) for way in (*CALL_COSTS, "varlen")),
    ],
    ids=str,
)
def test_rows_attend_within_themselves(
    device: Device,
    way: str,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None,
    parents: tuple[int, ...] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found_inputs = inputs(dtype, device)
    if way == "varlen":
        if not subject._has_varlen_kernel(*found_inputs[::2]):
            pytest.skip("needs CUDA and a torch whose varlen attention takes a window")
    else:
        monkeypatch.setattr(subject, "_varlen", None)
        for name in ("_CALL_COST_CPU", "_CALL_COST_CUDA"):
            monkeypatch.setattr(subject, name, CALL_COSTS[way])
    layout = PackedLayout.of(
        LENGTHS, torch.device(device), NUM_HEADS * HEAD_DIM, parents=parents
    ).on(torch.device(device))
    if parents is not None:
        assert any(bucket.path for bucket in layout.buckets)
    elif way == "alone":
        # rows of one length share a call at no cost
        assert len(layout.buckets) == len(set(LENGTHS)) + 1
    elif way == "one_bucket":
        assert len(layout.buckets) == 1
    elif way == "buckets":
        assert 1 < len(layout.buckets) < len(LENGTHS)
    exact_inputs = inputs(torch.float64, Device.cpu)
    upstream = torch.randn(
        1,
        sum(LENGTHS),
        NUM_HEADS,
        HEAD_DIM,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )
    found, _ = packed_attention(
        torch.nn.Module(), *found_inputs, None, layout=layout, sliding_window=window
    )
    expected = exact(*exact_inputs, window, parents)
    assert (found.cpu().double() - expected).abs().max() < tolerance
    found.backward(upstream.to(device, dtype))
    expected.backward(upstream)
    for one, other in zip(found_inputs, exact_inputs, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        scale = other.grad.abs().max()
        assert (one.grad.cpu().double() - other.grad).abs().max() < tolerance * scale
