"""What ranks seal is the whole model, whatever each of them holds of it.

The engine here holds its matrices cut along their columns within model groups of two, as tensor
parallelism does: no rank's part is a range of the flat matrix.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from areal_sc.config.schema import WeightUpdateConfig
from areal_sc.engines.weight_group import (
    BucketLayout,
    NamedTensor,
    flat_share,
    layout_of,
    split_into_buckets,
)
from areal_sc.errors import StoreFull
from areal_sc.transport.shards.store import TensorStore
from areal_sc.workers.weight_publication import WeightPublication

WORLD_SIZE, MODEL_SIZE = 4, 2
BUCKET_BYTES = 2000
TIMEOUT_S = 30.0
SHAPES = {"embed": (30, 8), "up": (20, 64), "down": (64, 20), "norm": (3, 4), "head": (30, 8)}


def whole_model(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()
    }


class Meeting:
    """Where the ranks of one model group exchange tensors."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(MODEL_SIZE, timeout=TIMEOUT_S)
        self._brought: dict[int, torch.Tensor] = {}

    def gather(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._brought[rank] = tensor
        self._barrier.wait()
        found = [self._brought[other] for other in range(MODEL_SIZE)]
        self._barrier.wait()
        return found


class ColumnParallelEngine:
    """The part of a TrainEngine that publishes; each rank has half of the columns.

    Attributes:
        held_bytes: of the largest bucket that was whole here.
    """

    def __init__(self, rank: int, meeting: Meeting, dtype: torch.dtype) -> None:
        self._rank = rank % MODEL_SIZE
        self._meeting = meeting
        self._dtype = dtype
        self._columns = {
            name: tensor.chunk(MODEL_SIZE, dim=1)[self._rank].clone()
            for name, tensor in whole_model(torch.float32).items()
        }
        self.held_bytes = 0

    def flat_parts(self) -> None:
        """Its columns are no range of a flat matrix."""

    def gather_weights(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        for layout in self.weight_layouts(bucket_bytes):
            bucket = [
                (name, torch.cat(self._meeting.gather(self._rank, columns), 1).to(self._dtype))
                for name, columns in ((name, self._columns[name]) for name in layout.names)
            ]
            self.held_bytes = max(self.held_bytes, sum(tensor.nbytes for _, tensor in bucket))
            yield bucket

    def weight_layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        whole = [
            (name, torch.empty(shape, dtype=self._dtype, device="meta"))
            for name, shape in SHAPES.items()
        ]
        return [layout_of(bucket) for bucket in split_into_buckets(whole, bucket_bytes)]


async def compute(function: Callable[[], Any]) -> Any:
    return function()


def seal_on_all_ranks(
    stores: list[TensorStore], dtype: torch.dtype
) -> tuple[list[ColumnParallelEngine], list[str | StoreFull]]:
    meetings = [Meeting() for _ in range(WORLD_SIZE // MODEL_SIZE)]
    engines = [
        ColumnParallelEngine(rank, meetings[rank // MODEL_SIZE], dtype)
        for rank in range(WORLD_SIZE)
    ]

    def seal(rank: int) -> str | StoreFull:
        publication = WeightPublication(
            engines[rank],  # type: ignore[arg-type]
            stores[rank],
            WeightUpdateConfig(bucket_bytes=BUCKET_BYTES),
            compute,
            rank=rank,
            world_size=WORLD_SIZE,
            host="127.0.0.1",
            node="",
        )
        try:
            return asyncio.run(publication.seal())
        except StoreFull as error:
            return error

    with ThreadPoolExecutor(WORLD_SIZE) as ranks:
        return engines, list(ranks.map(seal, range(WORLD_SIZE), timeout=TIMEOUT_S))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_of_ranks_make_the_whole_model(dtype: torch.dtype) -> None:
    stores = [TensorStore(f"train/{n}", "life", max_bytes=1 << 20) for n in range(WORLD_SIZE)]
    engines, shard_ids = seal_on_all_ranks(stores, dtype)
    parts: dict[str, list[torch.Tensor]] = {}
    num_values = []
    for store, shard_id in zip(stores, shard_ids, strict=True):
        fields = store.describe(str(shard_id))
        num_values.append(sum(sum(field.row_lengths) for field in fields.values()))
        for name, field in fields.items():
            parts.setdefault(name, []).append(
                torch.frombuffer(bytearray(field.values), dtype=dtype)
            )
    expected = whole_model(dtype)
    assert parts.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(torch.cat(parts[name]).view(tensor.shape), tensor), name
    num_buckets = len(engines[0].weight_layouts(BUCKET_BYTES))
    assert num_buckets > 2
    assert max(num_values) - min(num_values) <= num_buckets, "each bucket is cut evenly"
    largest_tensor = max(tensor.nbytes for tensor in expected.values())
    assert all(engine.held_bytes <= max(BUCKET_BYTES, largest_tensor) for engine in engines)


def test_a_rank_without_room_does_not_keep_the_others_from_sealing() -> None:
    sizes = [1 << 20, 100, 1 << 20, 1 << 20]
    stores = [TensorStore(f"train/{n}", "life", max_bytes=size) for n, size in enumerate(sizes)]
    _, outcomes = seal_on_all_ranks(stores, torch.float32)
    assert [isinstance(outcome, StoreFull) for outcome in outcomes] == [False, True, False, False]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 50])
def test_flat_shares_are_even_and_whole(num_ranks: int) -> None:
    bucket = [("a", torch.arange(10)), ("b", torch.arange(6.0).view(2, 3)), ("c", torch.ones(1))]
    shares = [flat_share(bucket, rank, num_ranks) for rank in range(num_ranks)]
    sizes = [sum(len(part) for _, part in share) for share in shares]
    assert sum(sizes) == 17
    assert max(sizes) - min(sizes) <= 1
    for name, tensor in bucket:
        parts = [part for share in shares for found, part in share if found == name]
        assert torch.equal(torch.cat(parts), tensor.flatten())
