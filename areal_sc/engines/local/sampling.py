"""Sampling the next token of every row at once, with its log-probability."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


def sample(
    logits: torch.Tensor,
    random: npt.NDArray[np.float32],
    temperature: npt.NDArray[np.float32],
    top_p: npt.NDArray[np.float32],
    top_k: npt.NDArray[np.int64],
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row.

    The order is temperature, top-k, top-p; each acts on the renormalised distribution before it.

    Args:
        logits: [N, V], any float dtype.
        random: [N] in [0, 1).
        temperature: [N]; 0 takes the most probable token.
        top_p: [N] in (0, 1]: the fewest most probable tokens with at least this mass are kept.
        top_k: [N]; 0 keeps all tokens.
    Returns: [N] int64 tokens, and [N] float32 log-probabilities (nats) under the distribution
        that was sampled from; of greedy rows under the distribution at temperature 1.
    """
    device, vocabulary = logits.device, logits.shape[-1]
    logits = logits.float()
    greedy = temperature == 0
    if not np.all(greedy | (temperature == 1)):
        divisor = np.where(greedy, np.float32(1), temperature)
        logits = logits / torch.from_numpy(divisor).to(device)[:, None]
    logprobs = torch.log_softmax(logits, dim=-1)
    draws = torch.from_numpy(random).to(device)
    if greedy.all():
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _inverse_cdf(logprobs, draws, logprobs.shape[-1] - 1)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(device), logits.argmax(-1), tokens)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]

    is_filtered = ~greedy & ((top_p < 1) | ((top_k > 0) & (top_k < vocabulary)))
    if is_filtered.any():
        rows = torch.from_numpy(np.flatnonzero(is_filtered)).to(device)
        tokens[rows], chosen[rows] = _sample_filtered(
            logits[rows],
            draws[rows],
            torch.from_numpy(top_p[is_filtered]).to(device),
            torch.from_numpy(top_k[is_filtered]).to(device),
        )
    return tokens, chosen


def _inverse_cdf(
    logprobs: torch.Tensor, draws: torch.Tensor, last: torch.Tensor | int
) -> torch.Tensor:
    """[N] int64: first index at which the cumulated probability exceeds the draw.

    Args:
        last: the largest index that may be chosen, of all rows or [N] of each. A parallel scan on
            CUDA rounds differently from place to place: what it cumulates may still grow where the
            probabilities are 0.
    """
    cumulated = logprobs.exp().cumsum(dim=-1)
    # a share of the actual total, which rounding may keep from being 1
    threshold = draws[:, None] * cumulated[:, -1:]
    indices = torch.searchsorted(cumulated, threshold, right=True)[:, 0]
    return indices.clamp(max=last)


def _sample_filtered(
    logits: torch.Tensor, draws: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples with top-p and top-k like `sample`, from logits divided by the temperature."""
    ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((rank >= top_k[:, None]) & (top_k > 0)[:, None], -torch.inf)
    probabilities = ordered.softmax(dim=-1)
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    outside = (mass_before >= top_p[:, None]) & (top_p < 1)[:, None]
    logprobs = ordered.masked_fill(outside, -torch.inf).log_softmax(dim=-1)
    # the most probable tokens come first; of logits that are NaN none is more probable
    last = ((logprobs > -torch.inf).sum(-1) - 1).clamp(min=0)
    ranks = _inverse_cdf(logprobs, draws, last)[:, None]
    return token_ids.gather(1, ranks)[:, 0], logprobs.gather(1, ranks)[:, 0]
