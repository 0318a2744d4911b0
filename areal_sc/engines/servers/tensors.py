"""Weights on their way into a server of this machine: buckets of bounded size in shared memory.

The bytes are written once, whatever the number of ranks, and not sent at all. There are two
buffers: one is filled while the server loads from the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights
from areal_sc.engines.weight_group import (
    NamedTensor,
    in_byte_order,
    layout_of,
    split_into_buckets,
)

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource
    from areal_sc.engines.servers.client import ServerClient

NUM_BUFFERS = 2


class SharedBuckets:
    """The two buffers; they grow to the largest bucket, and live until `close`."""

    def __init__(self) -> None:
        self.close()

    def close(self) -> None:
        """Gives the memory back, once the server maps it no more."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    async def fill(self, bucket: Sequence[NamedTensor], number: int) -> torch.Tensor:
        """[n] uint8 in shared memory: the bucket's bytes, in the order of its layout."""
        return await asyncio.to_thread(self._fill, bucket, number)

    def _fill(self, bucket: Sequence[NamedTensor], number: int) -> torch.Tensor:
        size = sum(tensor.nbytes for _, tensor in bucket)
        buffer = self._buffers[number % NUM_BUFFERS]
        if buffer.nbytes < size:
            self._buffers[number % NUM_BUFFERS] = buffer = _shared_bytes(size)
        start = 0
        for _, tensor in in_byte_order(bucket):
            end = start + tensor.nbytes
            buffer[start:end].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            start = end
        return buffer[:size]


@dataclass
class TensorWeights(VersionWeights):
    """Tensors of this process, for the server that it has started; through shared memory.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name; asked at each `opened`.
        bucket_bytes: shared memory that is filled at one time, and as much again meanwhile.
    """

    version: int
    source: TensorSource
    buckets: SharedBuckets
    bucket_bytes: int
    _in_buckets: Sequence[Sequence[NamedTensor]] = ()  # while it is open
    _fills: dict[int, asyncio.Task[torch.Tensor]] = field(default_factory=dict)  # by bucket

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        tensors = list(await self.source())
        self._in_buckets = list(split_into_buckets(tensors, self.bucket_bytes))
        try:
            for number in range(min(NUM_BUFFERS, len(self._in_buckets))):
                self._begin_fill(number)
                await self._fills[number]
            yield
        finally:
            await asyncio.gather(*self._fills.values(), return_exceptions=True)
            self._fills.clear()
            self._in_buckets = ()

    async def load(self, server: ServerClient, times: UpdateTimes) -> None:
        """Every bucket is written once; its buffer is used again when the server has loaded it."""
        await server.begin_update()
        for number, bucket in enumerate(self._in_buckets):
            flat = await self._fills[number]
            del self._fills[number]
            is_last = number == len(self._in_buckets) - 1
            await server.load_tensors(flat, layout_of(bucket), drops_cache=is_last)
            times.update_bytes += flat.nbytes
            if number + NUM_BUFFERS < len(self._in_buckets):
                self._begin_fill(number + NUM_BUFFERS)
        await server.end_update()

    def _begin_fill(self, number: int) -> None:
        fill = self.buckets.fill(self._in_buckets[number], number)
        self._fills[number] = asyncio.create_task(fill)


def _shared_bytes(size: int) -> torch.Tensor:
    """[size] uint8 in memory that other processes map by its name."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
