"""Attention of runs that follow the same tokens: they see these, and each run itself."""

from __future__ import annotations

from typing import Any

import torch

from areal_sc.engines.plain_attention import AttentionRule, attend, is_seen


def attend_behind(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_before: torch.Tensor,
    value_before: torch.Tensor,
    length: int,
    rule: AttentionRule,
) -> torch.Tensor:
    """[N, H, D_value] causal attention of N = B * `length` tokens, of B runs.

    Args:
        query, key, value: [N, H, D], [N, H_kv, D], [N, H_kv, D_value].
        key_before, value_before: [P, H_kv, D], [P, H_kv, D_value] of the tokens that all follow.
        length: of each run, padded on the right.
    """
    num_before = len(key_before)
    is_windowed = rule.window is not None and num_before + length > rule.window
    has_kernel = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    if rule.is_plain and has_kernel and not is_windowed:
        attended: torch.Tensor = _TwoParts.apply(  # type: ignore[no-untyped-call]
            query, key, value, key_before, value_before, length, rule.scale
        )
        return attended
    if is_windowed and rule.window is not None:  # what none of them sees
        seen = slice(max(0, num_before - rule.window + 1), None)
        key_before, value_before = key_before[seen], value_before[seen]
    queries, *own = (_batch(tensor, length) for tensor in (query, key, value))
    before = (_batch(tensor, len(tensor)) for tensor in (key_before, value_before))
    keys, values = (
        torch.cat([first.expand(len(queries), -1, -1, -1), second], 2)
        for first, second in zip(before, own, strict=True)
    )
    entries = torch.arange(keys.shape[2], device=query.device)

    def mask() -> torch.Tensor:
        return is_seen(entries, entries[len(key_before) :], rule.window)

    return _flat(attend(queries, keys, values, rule, mask, is_at_start=False))


class _TwoParts(torch.autograd.Function):
    """Attention to the tokens before, by one call for all runs, and of the runs to themselves.

    A part's weights are those of both together times its share exp(lse_part - lse), where lse is
    the logarithm of the sum of all exponentials. The kernel's backward pass computes weights from
    scores and lse: with that of both parts it gives their gradients.
    Source: FlashAttention, arXiv:2205.14135, section 3.1 and algorithm 4.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_before: torch.Tensor,
        value_before: torch.Tensor,
        length: int,
        scale: float,
    ) -> torch.Tensor:
        # [1, H, N, D]: to the tokens before, the runs are one
        given = [_batch(it, len(it)) for it in (query, key_before, value_before)]
        before, lse_before = _kernel(*given, scale=scale)
        given = [_batch(it, length) for it in (query, key, value)]
        own, lse_own = _kernel(*given, is_causal=True, scale=scale)
        before, own = _flat(before), _flat(own)
        lse_before, lse_own = _flat(lse_before[..., None]), _flat(lse_own[..., None])
        lse = torch.logaddexp(lse_before, lse_own)
        attended = before * (lse_before - lse).exp() + own * (lse_own - lse).exp()
        attended = attended.to(query.dtype)
        ctx.save_for_backward(query, key, value, key_before, value_before, attended, lse)
        ctx.length, ctx.scale = length, scale
        return attended

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, key_before, value_before, attended, lse = ctx.saved_tensors
        grad = grad.contiguous()

        def of_part(keys: torch.Tensor, values: torch.Tensor, *, is_own: bool) -> Any:
            size, num_keys = (ctx.length, ctx.length) if is_own else (len(query), len(keys))
            of_queries, of_keys, of_values = _kernel_backward(
                _batch(grad, size),
                _batch(query, size),
                _batch(keys, num_keys),
                _batch(values, num_keys),
                _batch(attended, size),
                _batch(lse, size)[..., 0],
                0.0,
                is_own,
                scale=ctx.scale,
            )
            return _flat(of_queries), _flat(of_keys), _flat(of_values)

        of_queries, of_key, of_value = of_part(key, value, is_own=True)
        added, of_key_before, of_value_before = of_part(key_before, value_before, is_own=False)
        return of_queries + added, of_key, of_value, of_key_before, of_value_before, None, None


_kernel: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_kernel_backward: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _batch(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, H, L, D] of [B * L, H, D]."""
    return tokens.view(-1, length, *tokens.shape[1:]).transpose(1, 2)


def _flat(batch: torch.Tensor) -> torch.Tensor:
    """[B * L, H, D] of [B, H, L, D]."""
    return batch.transpose(1, 2).flatten(0, 1)
