from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
import torch

from areal_sc.transport.bulk.buffer_pool import BufferPool

MIB = 1 << 20


def address(buffer: np.ndarray) -> int:
    return int(buffer.ctypes.data)


def test_memory_comes_back_when_the_last_tensor_on_it_is_gone() -> None:
    pool = BufferPool(64 * MIB)
    buffer = pool.take_buffer(5 * MIB)
    where = address(buffer)
    tensor = torch.frombuffer(buffer, dtype=torch.float32, count=10, offset=64)
    view = tensor[3:].view(torch.int32)
    del buffer, tensor
    gc.collect()
    assert pool.idle_bytes == 0
    other = pool.take_buffer(5 * MIB)
    assert address(other) != where
    del view
    assert pool.idle_bytes == 6 * MIB
    assert address(pool.take_buffer(6 * MIB)) == where
    del other


def test_no_more_than_the_limit_is_kept() -> None:
    pool = BufferPool(10 * MIB)
    lent = [pool.take_buffer(4 * MIB) for _ in range(5)]
    lent.clear()
    assert pool.idle_bytes == 8 * MIB


@pytest.mark.parametrize("num_bytes", [0, 1, 1000, 1 << 16, (1 << 16) + 1, 3 << 20, 100_000_007])
def test_a_buffer_has_just_the_asked_size(num_bytes: int) -> None:
    buffer = BufferPool(MIB).take_buffer(num_bytes)
    assert (buffer.shape, buffer.dtype) == ((num_bytes,), np.uint8)
    assert buffer.flags.writeable


def test_at_most_a_third_of_a_buffer_is_unused() -> None:
    pool = BufferPool(1 << 40)
    for num_bytes in [65_536, 65_537, 98_304, 98_305, 131_072, 200_000, 5_000_001]:
        before = pool.idle_bytes
        pool.take_buffer(num_bytes)
        size = pool.idle_bytes - before
        assert size == 0 or num_bytes <= size <= num_bytes * 3 / 2  # 0: an idle one was lent


def test_buffers_may_be_dropped_in_any_thread_and_in_the_collector() -> None:
    pool = BufferPool(1 << 40)
    taken = [pool.take_buffer(MIB) for _ in range(64)]

    def drop() -> None:
        while True:
            try:
                cycle: list[object] = [taken.pop()]
            except IndexError:
                return
            cycle.append(cycle)

    threads = [threading.Thread(target=drop) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        pool.take_buffer(MIB)
    for thread in threads:
        thread.join(20)
    gc.collect()
    # whatever order they came back in: each is there once
    idle = [pool.take_buffer(MIB) for _ in range(pool.idle_bytes // MIB)]
    assert len({address(buffer) for buffer in idle}) == len(idle) >= 64
