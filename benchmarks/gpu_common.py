"""What the sections of the GPU benchmark share: models, clocks, memory, peak rates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

ROOT = Path(__file__).resolve().parents[1]

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
"""Dense bfloat16 rates by the vendor's data sheets, in the order in which names are looked for."""

LARGE_CARD_BYTES = 60 << 30
"""From here on two trainers of the model fit beside each other, without recomputation."""


@dataclass(frozen=True)
class Setting:
    """What a section is to measure on.

    Attributes:
        device: `cuda` or `cpu`.
        is_quick: fewer repetitions; on a CPU always tiny models too.
        limit_s: after which the section is killed.
        sglang_python: interpreter of an environment that has SGLang, or empty.
    """

    device: str
    is_quick: bool
    limit_s: float
    sglang_python: str = ""

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def has_large_card(self) -> bool:
        return self.is_cuda and total_bytes() >= LARGE_CARD_BYTES


@dataclass(frozen=True)
class ModelSizes:
    """A Qwen2 with random weights."""

    name: str
    hidden: int
    num_layers: int
    feed_forward: int
    num_heads: int
    num_kv_heads: int
    vocabulary: int

    def build(self, dtype: torch.dtype, device: str = "cpu") -> PreTrainedModel:
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.num_layers,
            intermediate_size=self.feed_forward,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device(device):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return model.eval()  # type: ignore[no-any-return]


HALF_BILLION = ModelSizes("Qwen2.5-0.5B", 896, 24, 4864, 14, 2, 151_936)
TINY = ModelSizes("tiny", 64, 2, 128, 4, 2, 512)


def sizes_for(setting: Setting) -> ModelSizes:
    """The model of half a billion parameters on a GPU; on a CPU one that only tries the code."""
    return HALF_BILLION if setting.is_cuda else TINY


def synchronize(device: str) -> None:
    """Waits for the kernels, so that a clock says how long they took."""
    if device == "cuda":
        torch.cuda.synchronize()


def total_bytes() -> int:
    return torch.cuda.get_device_properties(0).total_memory


def peak_bf16_flops() -> float | None:
    """Of this machine's GPU by its data sheet; None where it is not listed."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((flops for part, flops in PEAK_BF16_FLOPS.items() if part in name), None)


def measured_bf16_flops(device: str) -> float:
    """Rate of a large matrix product, the best of several: what the machine does reach."""
    size, repeats = (8192, 20) if device == "cuda" else (512, 3)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        start = time.perf_counter()
        torch.mm(left, right)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)


class PeakMemory:
    """Most memory in use on the device while the block ran, all processes together.

    Attributes:
        before_bytes: in use when it began.
        peak_bytes: most in use since.
    """

    def __init__(self) -> None:
        self.before_bytes = 0
        self.peak_bytes = 0

    @property
    def added_bytes(self) -> int:
        return self.peak_bytes - self.before_bytes


@contextmanager
def watched_memory(device: str, poll_s: float = 0.002) -> Iterator[PeakMemory]:
    """Polls the device's memory; on a CPU all numbers stay 0."""
    peak = PeakMemory()
    if device != "cuda":
        yield peak
        return
    peak.before_bytes = peak.peak_bytes = _used_bytes()
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.wait(poll_s):
            peak.peak_bytes = max(peak.peak_bytes, _used_bytes())

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield peak
    finally:
        is_over.set()
        thread.join()


def _used_bytes() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


def peak_allocated(device: str, action: Callable[[], object]) -> int:
    """Most bytes that this process had allocated on the device during an action."""
    if device != "cuda":
        action()
        return 0
    torch.cuda.reset_peak_memory_stats()
    action()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()
