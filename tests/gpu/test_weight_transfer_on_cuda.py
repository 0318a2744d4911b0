"""What carries weights from a GPU: copies to pinned memory, and groups of NCCL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from areal_sc.config.schema import Device
from areal_sc.engines.training.whole_tensors import through_pinned_memory
from areal_sc.errors import EngineFailed
from areal_sc.weights.group import (
    Backend,
    NamedTensor,
    WeightBroadcaster,
    WeightReceiver,
    layout_of,
    split_into_buckets,
)

pytestmark = pytest.mark.gpu

LIMIT_S = 60.0
NEVER = threading.Event()


def weights(device: torch.device) -> list[NamedTensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        (f"{dtype}.{number}", torch.randn(size, generator=generator).to(device, dtype))
        for number, size in enumerate((7, 1000, 3, 1 << 20))
        for dtype in (torch.float32, torch.bfloat16)
    ]


def broadcaster(device: Device) -> WeightBroadcaster:
    backend: Backend = "nccl" if device == Device.cuda else "gloo"
    return WeightBroadcaster("group", "127.0.0.1", backend, LIMIT_S)


def test_pinned_copies_are_of_what_was_there(device: Device) -> None:
    if device == Device.cpu:
        pytest.skip("memory is pinned for a GPU")
    tensors = [tensor for _, tensor in weights(torch.device(device))]
    whole = torch.empty(1 << 20, device=device)

    def overwritten() -> Iterator[torch.Tensor]:
        for tensor in tensors:
            yield whole[: len(tensor)].view(-1).copy_(tensor)

    copies = (copy.clone() for copy in through_pinned_memory(overwritten()))
    for copy, tensor in zip(copies, tensors, strict=True):
        assert copy.device.type == "cpu"
        assert torch.equal(copy, tensor.float().cpu())


def test_a_group_of_one_sends_and_is_left(device: Device) -> None:
    root = broadcaster(device)
    root.meet(1)
    for bucket in split_into_buckets(weights(torch.device(device)), 4000):
        assert root.broadcast(bucket, NEVER) == sum(tensor.nbytes for _, tensor in bucket)
    root.close()
    with pytest.raises(EngineFailed, match="has left it"):
        root.broadcast(bucket, NEVER)


def test_two_ranks_have_the_same_weights(device: Device) -> None:
    """NCCL takes no GPU twice."""
    if device == Device.cuda and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    targets = [torch.device(device, n if device == Device.cuda else 0) for n in range(2)]
    buckets = list(split_into_buckets(weights(targets[0]), 4000))
    root = broadcaster(device)
    with ThreadPoolExecutor(1) as other:
        joining = other.submit(WeightReceiver, root.describe(2), 1, targets[1], LIMIT_S)
        root.meet(2)
        receiver = joining.result(LIMIT_S)
        for bucket in buckets:
            received = other.submit(receiver.receive, layout_of(bucket))
            root.broadcast(bucket, NEVER)
            found = dict(received.result(LIMIT_S))
            for name, tensor in bucket:
                assert found[name].device.type == device
                assert torch.equal(found[name].cpu(), tensor.cpu())
    receiver.close()
    root.close()
