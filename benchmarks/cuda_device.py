"""What a benchmark asks of its device: memory, and what a GPU can reach."""

from __future__ import annotations

import threading
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


def peak_bf16_flops(device: str) -> float | None:
    """Of this machine's GPU by its data sheet; None on a CPU, and where it is not listed."""
    name = torch.cuda.get_device_name() if device == "cuda" else ""
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)


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
