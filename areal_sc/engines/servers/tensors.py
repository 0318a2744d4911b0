"""Weights on their way into servers of this machine: buckets of bounded size in shared memory.

The bytes are written once, whatever the number of servers and ranks, and not sent at all. There are
two buffers: one is filled while the servers load from the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from areal_sc.engines.servers.weights import UpdateTimes, VersionWeights, for_each
from areal_sc.engines.weight_group import (
    NamedTensor,
    in_byte_order,
    layout_of,
    split_into_buckets,
)
from areal_sc.errors import ArealError, ConfigError

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource
    from areal_sc.engines.servers.client import ServerClient

NUM_BUFFERS = 2


class SharedBuckets:
    """The two buffers; they grow to the largest bucket, and live until `close`.

    Attributes:
        turn: to be held from the first `fill` until the last bucket was loaded.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.close()

    def close(self) -> None:
        """Gives the memory back, once no server maps it."""
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
    """Tensors of this process, for servers that it has started; through shared memory.

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
        async with self.buckets.turn:
            self._in_buckets = list(split_into_buckets(tensors, self.bucket_bytes))
            try:
                yield
            finally:
                await self._drop_fills()
                self._in_buckets = ()

    async def prepare(self) -> None:
        await self._drop_fills()  # of a wave that has loaded nothing, or not all
        for number in range(min(NUM_BUFFERS, len(self._in_buckets))):
            self._begin_fill(number)
            await self._fills[number]

    async def load(
        self, servers: Sequence[ServerClient], times: UpdateTimes
    ) -> dict[ServerClient, ArealError]:
        """Every bucket is written once; its buffer is reused when every server has loaded it."""

        async def begin(server: ServerClient) -> None:
            if not server.is_own:
                raise ConfigError(
                    f"{server.url} was not started by this worker, and tensors go only to "
                    "servers that were: set weight_update.method to disk or collective"
                )
            await server.begin_update()

        async def load_bucket(server: ServerClient) -> None:
            await server.load_tensors(flat, layout, drops_cache=is_last)

        failed: dict[ServerClient, ArealError] = {}
        await for_each(servers, begin, failed)
        for number, bucket in enumerate(self._in_buckets):
            flat = await self._fills[number]
            del self._fills[number]
            layout, is_last = layout_of(bucket), number == len(self._in_buckets) - 1
            await for_each(servers, load_bucket, failed)
            times.update_bytes += flat.nbytes
            if number + NUM_BUFFERS < len(self._in_buckets):
                self._begin_fill(number + NUM_BUFFERS)
        await for_each(servers, lambda server: server.end_update(), failed)
        return failed

    def _begin_fill(self, number: int) -> None:
        fill = self.buckets.fill(self._in_buckets[number], number)
        self._fills[number] = asyncio.create_task(fill)

    async def _drop_fills(self) -> None:
        await asyncio.gather(*self._fills.values(), return_exceptions=True)
        self._fills.clear()


def _shared_bytes(size: int) -> torch.Tensor:
    """[size] uint8 in memory that other processes map by its name."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
