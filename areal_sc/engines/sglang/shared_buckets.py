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
import itertools
import pickle
from collections.abc import AsyncGenerator, Iterable, Iterator
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


class SharedBuckets:
    """The two buffers; they grow to the largest bucket, and live until `close`.

    Attributes:
        turn: to be held around `fill`, which only one load at a time may use.
    """

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    async def fill(
        self, buckets: Iterable[list[NamedTensor]], num_readers: int
    ) -> AsyncGenerator[tuple[str, int], None]:
        """Yields the base64 pickle of each bucket, and its bytes.

        The next buffer is filled meanwhile. A buffer is written again after the bucket behind its
        own was asked for: ask only when all readers have loaded what they were given.

        Args:
            num_readers: processes that will unpickle each bucket.
        """
        source = iter(buckets)
        for number in itertools.count():
            if number == 0:
                filled = await asyncio.to_thread(self._fill_next, source, number)
            if filled is None:
                return
            upcoming = asyncio.create_task(asyncio.to_thread(self._fill_next, source, number + 1))
            try:
                flat, layout = filled
                yield _pickle(flat, layout, num_readers), flat.nbytes
            finally:
                filled = await upcoming

    def close(self) -> None:
        """Gives the memory back, once no server maps it."""
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * NUM_BUFFERS

    def _fill_next(
        self, source: Iterator[list[NamedTensor]], number: int
    ) -> tuple[torch.Tensor, list[SimpleNamespace]] | None:
        """The next bucket as flat bytes in shared memory, and where each tensor is in it."""
        bucket = next(source, None)
        if bucket is None:
            return None
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
