"""Losses over trained tokens. Sums over micro-batches and ranks give the loss of the minibatch.

A loss is a function `(tokens, **settings) -> (scalar loss, metrics)`: `named_loss` tells how it is
named. Its denominator is `tokens.num_loss_tokens`, not the number of tokens that it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

Metrics = dict[str, torch.Tensor]
"""Scalar sums over trained tokens, without gradient; they add up over micro-batches and ranks."""


@dataclass(frozen=True)
class LossTokens:
    """The trained tokens of one micro-batch, on the model's device; there may be none.

    Attributes:
        logprobs: [N] float32, nats, of the weights that are trained; requires grad.
        fields: looked up by name: [N] values of the rows' field at these tokens, of
            `behavior_logprobs`, say; `advantages` are float32, each of the token or of its row,
            `proximal_logprobs` those of the weights before the first minibatch.
        num_loss_tokens: trained tokens of the minibatch over all ranks and micro-batches, > 0;
            also those that go through no model, as nothing depends on them.
    """

    logprobs: torch.Tensor
    fields: Mapping[str, torch.Tensor]
    num_loss_tokens: int


Loss = Callable[[LossTokens], tuple[torch.Tensor, Metrics]]
"""A loss with its settings."""


def decoupled_ppo(
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_center: str = "proximal",
    use_behavior_weight: bool = True,
    behavior_weight_cap: float = float("inf"),
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean PPO loss whose trust region is centred on a proximal policy.

    L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / num_loss_tokens,
    r = pi_theta / pi_prox, w = pi_prox / pi_behav (no gradient).
    Source: AReaL, arXiv:2505.24298, eq. 5.

    Args:
        tokens: with fields `behavior_logprobs`, `proximal_logprobs` and `advantages`.
        clip_low, clip_high: how far r may fall below and rise above 1 before the gain is cut.
        clip_center: `proximal`, or `behavior`: pi_prox is pi_behav then, and w is 1.
        use_behavior_weight: False: w is 1.
        behavior_weight_cap: tokens with w above it leave the numerator, not the denominator.
    Returns: scalar loss, and sums over these tokens: `num_tokens`, `num_clipped` (the clipped
        branch is the smaller one), `num_capped`, `sum_ratio`, `sum_abs_advantage`,
        `sum_behavior_weight` (as used: 0 over the cap), and of r - 1 - log r, a divergence
        estimate, `sum_proximal_kl` and the same of w, `sum_behavior_kl` (without capped tokens).
    """
    dtype = tokens.logprobs.dtype
    proximal = tokens.fields[f"{clip_center}_logprobs"].detach().to(dtype)
    behavior = proximal
    if use_behavior_weight:
        behavior = tokens.fields["behavior_logprobs"].detach().to(dtype)
    advantage = tokens.fields["advantages"].detach().to(dtype)

    log_ratio = tokens.logprobs - proximal
    ratio = log_ratio.exp()
    log_weight = proximal - behavior
    weight = log_weight.exp()
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    is_capped = ~(weight <= behavior_weight_cap)  # so that NaN, too, is over the cap
    # before it meets a gradient: 0 * inf would be NaN
    weight = weight.masked_fill(is_capped, 0.0)
    log_weight = log_weight.masked_fill(is_capped, 0.0)
    loss = -(weight * torch.minimum(unclipped, clipped)).sum() / tokens.num_loss_tokens
    with torch.no_grad():
        metrics = {
            "num_tokens": torch.ones_like(advantage).sum(),
            "num_clipped": (clipped < unclipped).sum(),
            "num_capped": is_capped.sum(),
            "sum_ratio": ratio.sum(),
            "sum_behavior_weight": weight.sum(),
            "sum_abs_advantage": advantage.abs().sum(),
            "sum_proximal_kl": (ratio - 1 - log_ratio).sum(),
            "sum_behavior_kl": (weight - 1 - log_weight)[~is_capped].sum(),
        }
    return loss, {name: value.detach().float() for name, value in metrics.items()}


def cross_entropy(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Token-mean cross entropy of given completions: -sum_t logprobs_t / num_loss_tokens.

    Returns: scalar loss, and the sums `num_tokens` and `sum_logprob`.
    """
    total = tokens.logprobs.sum()
    num_tokens = torch.ones_like(tokens.logprobs.detach()).sum()
    metrics = {"num_tokens": num_tokens.float(), "sum_logprob": total.detach().float()}
    return -total / tokens.num_loss_tokens, metrics
