"""Estimates of the divergence from a reference policy, from the sampled tokens alone."""

from __future__ import annotations

from typing import Final

import torch

from areal_sc.algorithms.loss_tokens import RowTokens

_MOST_NATS: Final = 60.0
"""A ratio counts as no more than exp of this: the sum of a trillion of them is still a float32."""


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """An estimate of KL(pi || pi_ref) for each token that pi has sampled.

    Its value is d = log pi - log pi_ref, whose expected value is the divergence (k1). Its gradient
    is d grad log pi, in expectation that of the divergence, which d itself does not have.
    Source: J. Schulman, "Approximating KL Divergence" (2020); Y. Tang and R. Munos, "On a few
    pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477.

    Args:
        logprobs: [N] nats, of pi; may require grad.
        reference: [N] nats, of pi_ref; without gradient.
    Returns: [N] nats.
    """
    difference = logprobs - reference.detach()
    half_square = difference.square() / 2
    return difference.detach() + (half_square - half_square.detach())


def ratio_divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r >= 0 of ratios r that are given by their logarithms, and finite for each."""
    return torch.expm1(log_ratio.clamp(max=_MOST_NATS)) - log_ratio


def sampled_kl(tokens: RowTokens) -> torch.Tensor:
    """[N] `kl_estimate` of the policy that sampled, from the reference: a token function.

    Args: tokens: with fields `behavior_logprobs` and `reference_logprobs`.
    """
    fields = tokens.fields
    return kl_estimate(fields["behavior_logprobs"], fields["reference_logprobs"])
