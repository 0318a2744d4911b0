"""Attention of runs that follow the same tokens: they see these, and each run itself."""

from __future__ import annotations

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
    if rule.window is not None:  # what none of them sees
        seen = slice(max(0, len(key_before) - rule.window + 1), None)
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


def _batch(tokens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, H, L, D] of [B * L, H, D]."""
    return tokens.view(-1, length, *tokens.shape[1:]).transpose(1, 2)


def _flat(batch: torch.Tensor) -> torch.Tensor:
    """[B * L, H, D] of [B, H, L, D]."""
    return batch.transpose(1, 2).flatten(0, 1)
