"""The gains: what a token's ratio, advantage and weight add to the objective.

An exponential that may be infinite is left out before it is taken: 0 * inf would be NaN, in the
loss or in its gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

_MOST_LOG_RATIO: Final = 20.0
"""Above this log-ratio a gate is 1 to the last bit of a float64, and its slope 0."""


@dataclass(frozen=True, slots=True)
class GainTerms:
    """What a gain is made of, [N] each, one a token.

    Attributes:
        logprobs: nats, of the trained policy; requires grad.
        log_ratio: log pi_theta - log pi_centre, of the token or of its row; requires grad.
        ratio: its exponential, without gradient.
        advantages: without gradient.
        weight, log_weight: of the sampling policy, and its logarithm; without gradient.
        is_dropped: tokens that gain nothing.
    """

    logprobs: torch.Tensor
    log_ratio: torch.Tensor
    ratio: torch.Tensor
    advantages: torch.Tensor
    weight: torch.Tensor
    log_weight: torch.Tensor
    is_dropped: torch.Tensor


Gains = tuple[torch.Tensor, torch.Tensor]
"""[N] the weighted gains, and [N] bool, where a bound has cut the gain."""


def clip_gain(terms: GainTerms, low: float, high: float, dual: float = math.inf) -> Gains:
    """w min(r A, clip(r, 1 - low, 1 + high) A), and where A < 0 no less than w dual A.

    Source: PPO, arXiv:1707.06347, eq. 7; a `high` of its own, DAPO, arXiv:2503.14476, eq. 8;
    `dual`, arXiv:1912.09729.
    """
    ratio, advantages = terms.ratio, terms.advantages
    bounded = ratio.clamp(1 - low, 1 + high)
    is_clipped = bounded * advantages < ratio * advantages
    if dual < math.inf:
        is_dual = (advantages < 0) & (ratio > dual)
        bounded = bounded.masked_fill(is_dual, dual)
        is_clipped |= is_dual
    is_without_gain = terms.is_dropped | (advantages == 0)
    is_constant = is_without_gain | is_clipped
    moving = (terms.log_weight + terms.log_ratio).masked_fill(is_constant, 0.0).exp()
    constant = (terms.weight * bounded).masked_fill(is_without_gain, 0.0)
    return torch.where(is_constant, constant, moving) * advantages, is_clipped


def plain_gain(terms: GainTerms) -> Gains:
    """w r A: no bound."""
    is_clipped = torch.zeros_like(terms.is_dropped)
    return _moving_gain(terms, terms.is_dropped), is_clipped


def divergence_gain(terms: GainTerms, limit: float, divergence: str) -> Gains:
    """w M r A: tokens that lead further away from a centre that is too far already gain nothing.

    M = 0 where A > 0 and r > 1, or A < 0 and r < 1, and D > limit; D is the divergence between
    the centre p and the policy q of the token against all others: tv |p - q|, or
    kl p log(p / q) + (1 - p) log((1 - p) / (1 - q)).
    Source: DPPO, arXiv:2602.04879 (binary approximations).
    """
    log_q = terms.logprobs.detach()
    log_p = log_q - terms.log_ratio.detach()
    p, q = log_p.exp(), log_q.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        rest_p, rest_q = -torch.expm1(log_p.clamp(max=0)), -torch.expm1(log_q.clamp(max=0))
        distance = p * (log_p - log_q) + torch.xlogy(rest_p, rest_p / rest_q)
    log_ratio, advantages = terms.log_ratio.detach(), terms.advantages
    is_leaving = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    is_clipped = is_leaving & (distance > limit)
    return _moving_gain(terms, terms.is_dropped | is_clipped), is_clipped


def stop_gradient_clip_gain(terms: GainTerms, low: float, high: float) -> Gains:
    """sg[w clip(r, 1 - low, 1 + high)] A log pi: every token has a gradient.

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5.
    """
    bounded = terms.ratio.clamp(1 - low, 1 + high)
    is_without_gain = terms.is_dropped | (terms.advantages == 0)
    factors = (terms.weight * bounded).masked_fill(is_without_gain, 0.0) * terms.advantages
    logprobs = terms.logprobs.masked_fill(is_without_gain, 0.0)
    return factors * logprobs, bounded != terms.ratio


def soft_gate_gain(terms: GainTerms, positive: float, negative: float) -> Gains:
    """w f(r) A, f(r) = (4 / tau) sigmoid(tau (r - 1)), tau = positive where A > 0, else negative.

    Source: SAPO, arXiv:2511.20347, eq. 5 and 6. Nothing is cut.
    """
    advantages = terms.advantages
    is_without_gain = terms.is_dropped | (advantages == 0)
    tau = torch.full_like(advantages, negative).masked_fill(advantages > 0, positive)
    ratio = terms.log_ratio.clamp(max=_MOST_LOG_RATIO).exp()
    gates = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    weight = terms.weight.masked_fill(is_without_gain, 0.0)
    return weight * gates * advantages, torch.zeros_like(is_without_gain)


def _moving_gain(terms: GainTerms, is_dropped: torch.Tensor) -> torch.Tensor:
    is_without_gain = is_dropped | (terms.advantages == 0)
    moving = (terms.log_weight + terms.log_ratio).masked_fill(is_without_gain, 0.0).exp()
    return (moving * terms.advantages).masked_fill(is_without_gain, 0.0)
