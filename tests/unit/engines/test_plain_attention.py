"""Which of torch's attention kernels is asked for; what they compute is tested where it is used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from areal_sc.engines.plain_attention import attend_by_kernel

HEADS, KEY_HEADS, LENGTH, WIDTH = 4, 2, 3, 8


@pytest.mark.parametrize(
    ("device", "dtype", "is_masked", "has_few_heads"),
    [
        ("cpu", torch.float32, False, True),
        ("cpu", torch.float32, True, True),
        ("meta", torch.bfloat16, False, True),
        ("meta", torch.float16, False, True),
        ("meta", torch.float32, False, False),
        ("meta", torch.bfloat16, True, False),
    ],
)
def test_a_gpu_never_stores_the_scores_of_whole_rows(
    device: str,
    dtype: torch.dtype,
    is_masked: bool,
    has_few_heads: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As it would for fewer key than query heads in float32, or with a mask."""
    asked: list[tuple[int, bool]] = []

    def attend(query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        assert key.shape == value.shape
        asked.append((key.shape[1], options["enable_gqa"]))
        return torch.empty_like(query)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    query = torch.empty(1, HEADS, LENGTH, WIDTH, dtype=dtype, device=device)
    few = query[:, :KEY_HEADS]
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device) if is_masked else None
    attend_by_kernel(query, few, few, scale=1.0, mask=mask, is_causal=not is_masked)
    assert asked == [(KEY_HEADS if has_few_heads else HEADS, has_few_heads)]
