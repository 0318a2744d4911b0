"""Averaging the gradients of FSDP's units on the CPU."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from areal_sc.engines.fsdp.gradient_reduction import InPlaceReduceScatter

NUM_RANKS = 2


def test_each_rank_has_its_part_of_the_mean_and_no_copy_of_the_rest() -> None:
    store = dist.HashStore()
    given = torch.randn(NUM_RANKS, 10, generator=torch.Generator().manual_seed(0))

    def average(rank: int) -> tuple[torch.Tensor, int]:
        group = dist.ProcessGroupGloo(store, rank, NUM_RANKS, timedelta(seconds=30))
        reduce = InPlaceReduceScatter()
        cpu = torch.device("cpu")
        copied = reduce.allocate((10,), dtype=torch.float32, device=cpu).copy_(given[rank])
        own = torch.empty(5)
        reduce(own, copied, group, dist.ReduceOp.AVG)
        return own, copied.untyped_storage().nbytes()

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        found = list(threads.map(average, range(NUM_RANKS)))
    means = given.double().mean(0)
    assert torch.allclose(torch.cat([own for own, _ in found]).double(), means, atol=1e-6)
    assert [num_bytes for _, num_bytes in found] == [0, 0]
