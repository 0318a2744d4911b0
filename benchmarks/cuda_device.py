"""What a benchmark asks of its device: an end of all kernels, memory, and what a GPU can reach."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bfloat16 rates by the vendors' data sheets, in the order in which names are looked for."""

_POLL_S = 0.002


def synchronize(device: str) -> None:
    """Waits for the kernels, so that a clock says how long they took."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bf16_flops(device: str) -> float | None:
    """Of this machine's GPU by its data sheet; None on a CPU, and where it is not listed."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    """Rate of a large matrix product, the best of several: what the machine does reach."""
    size, repeats = (8192, 20) if device == "cuda" else (512, 5)
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


def peak_allocated(device: str, action: Callable[[], object]) -> int:
    """Bytes that this process allocates on the GPU at most during an action; 0 on a CPU."""
    if device != "cuda":
        action()
        return 0
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@contextmanager
def device_memory(device: str) -> Iterator[list[int]]:
    """Samples the bytes of the GPU that all processes use together, first as it was before.

    On a CPU one sample of 0.
    """
    samples = [_used_bytes(device)]
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(_POLL_S):
            samples.append(_used_bytes(device))

    thread = threading.Thread(target=poll, daemon=True)
    if device == "cuda":
        thread.start()
    try:
        yield samples
    finally:
        is_over.set()
        if device == "cuda":
            thread.join()


def _used_bytes(device: str) -> int:
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free
