"""Weights on their way into servers of this machine: buckets of bounded size in shared memory.

SGLang's tensor interface takes a pickle that names shared memory, so the bytes are written once,
whatever the number of servers and ranks, and not sent at all. A server unpickles what it is given,
which is why this is used only towards servers that this process has started.

There are two buffers: one is filled while the servers load from the other.
"""

from __future__ import annotations

import asyncio
import base64
import io
import pickle
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing.reductions import (
    rebuild_storage_filename,
    rebuild_tensor,
    rebuild_typed_storage,
)

from areal_sc.engines.weight_group import NamedTensor, in_byte_order

NUM_BUFFERS = 2

Filled = tuple[torch.Tensor, list[SimpleNamespace]]


class SharedBuckets:
    """The two buffers; they grow to the largest bucket, and live until `close`.

    Attributes:
        turn: to be held from `fill` until its last bucket was loaded; one use at a time.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    async def fill(self, buckets: Iterable[list[NamedTensor]]) -> FilledBuckets:
        """Fills the buffers with the first buckets, so that a load can begin at once."""
        cut = list(buckets)
        filled = deque([await self.fill_one(cut, n) for n in range(min(NUM_BUFFERS, len(cut)))])
        return FilledBuckets(self, cut, filled)

    async def fill_one(self, buckets: Sequence[list[NamedTensor]], number: int) -> Filled:
        return await asyncio.to_thread(self._fill, buckets[number], number)

    def close(self) -> None:
        """Gives the memory back, once no server maps it."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    def _fill(self, bucket: Sequence[NamedTensor], number: int) -> Filled:
        """The bucket as flat bytes in shared memory, and where each tensor is in it."""
        size = sum(tensor.nbytes for _, tensor in bucket)
        buffer = self._buffers[number % NUM_BUFFERS]
        if buffer.nbytes < size:
            self._buffers[number % NUM_BUFFERS] = buffer = _shared_bytes(size)
        layout = []
        start = 0
        for name, tensor in in_byte_order(bucket):
            end = start + tensor.nbytes
            buffer[start:end].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            layout.append(
                SimpleNamespace(
                    name=name,
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    start_idx=start,
                    end_idx=end,
                    numel=tensor.nbytes,  # of the bytes that SGLang cuts out
                )
            )
            start = end
        return buffer[:size], layout


class FilledBuckets:
    """One pass over buckets, always one ahead of the servers."""

    def __init__(
        self,
        shared: SharedBuckets,
        buckets: Sequence[list[NamedTensor]],
        filled: deque[Filled],
    ) -> None:
        self._shared = shared
        self._buckets = buckets
        self._filled = filled

    async def each(self, num_readers: int) -> AsyncGenerator[tuple[str, int, bool]]:
        """Yields the base64 pickle of each bucket, its bytes, and whether it is the last one.

        A buffer is written again when the bucket behind its own was asked for: ask only when all
        readers have loaded what they were given.

        Args:
            num_readers: processes that will unpickle each bucket.
        """
        upcoming: asyncio.Task[Filled] | None = None
        for number in range(len(self._buckets)):
            flat, layout = self._filled.popleft()
            try:
                is_last = number == len(self._buckets) - 1
                yield _pickle(flat, layout, num_readers), flat.nbytes, is_last
            finally:
                if upcoming is not None:
                    self._filled.append(await upcoming)
                    upcoming = None
            if number + NUM_BUFFERS < len(self._buckets):
                filling = self._shared.fill_one(self._buckets, number + NUM_BUFFERS)
                upcoming = asyncio.create_task(filling)


class _SharedPickler(pickle.Pickler):
    """Names the shared memory of a tensor instead of copying it.

    As torch's own with the sharing strategy `file_system`, which is a setting of the whole process
    and would change what others do. Every reader gives back one count of references.
    """

    def __init__(self, file: io.BytesIO, num_readers: int) -> None:
        super().__init__(file, protocol=4)
        self._num_readers = num_readers

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            place = (value.storage_offset(), tuple(value.shape), value.stride(), False)
            return rebuild_tensor, (torch.Tensor, _typed_storage(value), place)
        if isinstance(value, torch.TypedStorage):
            return rebuild_typed_storage, (value._untyped_storage, value.dtype)
        if isinstance(value, torch.UntypedStorage):
            for _ in range(self._num_readers):
                value._shared_incref()  # type: ignore[no-untyped-call]
            shared = value._share_filename_cpu_()
            return rebuild_storage_filename, (torch.UntypedStorage, *shared)
        return NotImplemented


def _pickle(flat: torch.Tensor, layout: list[SimpleNamespace], num_readers: int) -> str:
    file = io.BytesIO()
    _SharedPickler(file, num_readers).dump({"flattened_tensor": flat, "metadata": layout})
    return base64.b64encode(file.getvalue()).decode()


def _typed_storage(tensor: torch.Tensor) -> Any:
    return tensor._typed_storage()  # type: ignore[no-untyped-call]


def _shared_bytes(size: int) -> torch.Tensor:
    """[size] uint8 in memory that other processes map by its name."""
    storage = torch.UntypedStorage._new_using_filename_cpu(size)
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (size,), (1,))
