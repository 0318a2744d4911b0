"""Weights on their way into servers of this machine: buckets of bounded size in shared memory.

The bytes are written once, whatever the number of servers and ranks, and not sent at all. There are
two buffers: one is filled while the servers load from the other.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from areal_sc.engines.servers.weights import (
    LoadableWeights,
    LoadReport,
    PausedServer,
    Weights,
    for_each,
)
from areal_sc.engines.weight_group import (
    NamedTensor,
    in_byte_order,
    layout_of,
    split_into_buckets,
)
from areal_sc.errors import ConfigError
from areal_sc.weights import BucketLayout

if TYPE_CHECKING:
    from areal_sc.engines.base import TensorSource

NUM_BUFFERS = 2


class SharedBuckets:
    """The two buffers; they grow to the largest bucket, and live until `close`.

    Attributes:
        turn: to be held from the first `fill` until the last bucket was loaded.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    async def fill(self, bucket: Sequence[NamedTensor], number: int) -> torch.Tensor:
        """[n] uint8 in shared memory: the bucket's bytes, in the order of its layout."""
        return await asyncio.to_thread(self._fill, bucket, number)

    def close(self) -> None:
        """Gives the memory back, once no server maps it."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

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


@dataclass(frozen=True)
class TensorWeights(Weights):
    """Tensors of this process, for servers that it has started; through shared memory.

    Attributes:
        source: gives every parameter, shaped, under its Hugging Face name; asked at each `opened`.
        bucket_bytes: shared memory that is filled at one time, and as much again meanwhile.
    """

    version: int
    source: TensorSource
    buckets: SharedBuckets
    bucket_bytes: int

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[LoadableWeights]:
        tensors = list(await self.source())
        yield LoadableTensors(list(split_into_buckets(tensors, self.bucket_bytes)), self.buckets)


@dataclass
class LoadableTensors(LoadableWeights):
    """The tensors of `TensorWeights`, in buckets."""

    cut: Sequence[Sequence[NamedTensor]]
    buckets: SharedBuckets
    _fills: deque[asyncio.Task[torch.Tensor]] = field(default_factory=deque)

    @asynccontextmanager
    async def prepared(self) -> AsyncIterator[None]:
        """Fills the first buckets, while the servers still generate."""
        async with self.buckets.turn:
            try:
                for number in range(min(NUM_BUFFERS, len(self.cut))):
                    self._begin_fill(number)
                    await self._fills[number]
                yield
            finally:
                await asyncio.gather(*self._fills, return_exceptions=True)
                self._fills.clear()

    async def load(self, servers: Sequence[PausedServer], *, timeout_s: float) -> LoadReport:
        """Every bucket is written once; its buffer is reused when every server has loaded it."""

        async def begin(server: PausedServer) -> None:
            if not server.is_own:
                raise ConfigError(
                    f"{server.client.url} was not started by this worker, and tensors go only to "
                    "servers that were: set weight_update.method to disk or collective"
                )
            await server.client.begin_update()

        errors = await for_each(servers, begin)
        num_bytes = 0
        for number, bucket in enumerate(self.cut):
            flat = await self._fills[0]
            self._fills.popleft()
            load = partial(
                _load_bucket,
                flat=flat,
                layout=layout_of(bucket),
                drops_cache=number == len(self.cut) - 1,
                timeout_s=timeout_s,
            )
            errors = await for_each(servers, load, errors)
            num_bytes += flat.nbytes
            if number + NUM_BUFFERS < len(self.cut):
                self._begin_fill(number + NUM_BUFFERS)
        errors = await for_each(
            servers, lambda server: server.client.end_update(timeout_s=timeout_s), errors
        )
        return LoadReport(errors, num_bytes)

    def _begin_fill(self, number: int) -> None:
        self._fills.append(asyncio.create_task(self.buckets.fill(self.cut[number], number)))


async def _load_bucket(
    server: PausedServer,
    flat: torch.Tensor,
    layout: BucketLayout,
    drops_cache: bool,
    timeout_s: float,
) -> None:
    await server.client.load_tensors(flat, layout, drops_cache=drops_cache, timeout_s=timeout_s)


def _shared_bytes(size: int) -> torch.Tensor:
    """[size] uint8 in memory that other processes map by its name."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
