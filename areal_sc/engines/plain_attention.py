"""Attention by torch's kernels, and by its formula for what these do not know."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """How a layer weighs the tokens that it attends to.

    Attributes:
        scale: factor of the products of queries and keys.
        window: a token sees so many tokens, itself included; None: all before it.
        softcap: the scores' tanh soft cap (Gemma); None: none.
        sinks: [H] scores that take weight and give no value (gpt-oss); None: none.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused kernel computes it, with a mask for the window."""
        return self.softcap is None and self.sinks is None


def is_seen(entries: torch.Tensor, positions: torch.Tensor, window: int | None) -> torch.Tensor:
    """[..., L] bool: which `entries` [L] a token at each of `positions` [...] attends to."""
    last = positions[..., None]
    is_before = entries <= last
    return is_before if window is None else is_before & (entries > last - window)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rule: AttentionRule,
    mask: Callable[[], torch.Tensor],
    *,
    is_at_start: bool = True,
) -> torch.Tensor:
    """[B, H, Q, D_value] causal attention by the kernel where that knows the rule, else by scores.

    Args:
        query, key, value: as `attend_by_scores`.
        mask: gives its `is_seen`; not asked where the kernel knows that by itself.
        is_at_start: query n sees the entries until its own, which is entry n.
    """
    if not rule.is_plain:
        return attend_by_scores(query, key, value, mask(), rule)
    length = key.shape[2]
    is_masked = not is_at_start or (rule.window is not None and length > rule.window)
    return attend_by_kernel(
        query,
        key,
        value,
        scale=rule.scale,
        mask=mask() if is_masked else None,
        is_causal=length > 1 and not is_masked,
    )


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """[B, H, Q, D_value] by a kernel that does not store scores.

    On CUDA the kernel that takes fewer key than query heads, FlashAttention, has neither float32
    nor masks. Torch would compute the scores of whole rows then, [B, H, Q, L] in each layer, and
    keep them; with one key head a query head it has another kernel.

    Args:
        query, key, value: as `attend_by_scores`.
        mask: its `is_seen`, or what is added to the scores; None: each query sees all entries, or
            with `is_causal` those before.
    """
    has_few_heads = query.shape[1] != key.shape[1]
    is_half = query.dtype in (torch.bfloat16, torch.float16)
    if has_few_heads and query.device.type != "cpu" and not (is_half and mask is None):
        key, value = with_all_heads(key, query), with_all_heads(value, query)
        has_few_heads = False
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=has_few_heads,
    )


def attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    is_seen: torch.Tensor,
    rule: AttentionRule,
) -> torch.Tensor:
    """[B, H, Q, D_value]; all scores are in memory at once.

    Args:
        query: [B, H, Q, D].
        key, value: [B, H_kv, L, D] and [B, H_kv, L, D_value]; H_kv divides H.
        is_seen: bool, broadcast to [B, H, Q, L]; each query sees at least one entry.
    """
    key, value = with_all_heads(key, query), with_all_heads(value, query)
    scores = query @ key.transpose(-1, -2) * rule.scale
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~is_seen, float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1).to(scores.dtype)
        scores = torch.cat([scores, sinks], -1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=exact)[..., : key.shape[2]].to(value.dtype)
    return weights @ value


def with_all_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Keys or values once for each query head that they serve."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1)
