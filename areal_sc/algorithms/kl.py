"""Estimates of the divergence from a reference policy, from the sampled tokens alone."""

from __future__ import annotations

from typing import Final

import torch

from areal_sc.algorithms.loss_tokens import RowTokens

KL_ESTIMATORS = ("k1", "k2", "k3")

_MOST_NATS: Final = 60.0
"""A ratio counts as no more than exp of this: the sum of a trillion of them is still a float32."""


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """An estimate of KL(pi || pi_ref) for each token that pi has sampled.

    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The expected values
    of k1 and k3 are the divergence; that of k2 is close to it where the policies are. Whichever
    is chosen, the gradient is d grad log pi, in expectation that of the divergence, which of the
    three k2 alone has by itself: k1 has none, and k3 that of KL(pi_ref || pi).
    Source: J. Schulman, "Approximating KL Divergence" (2020); Y. Tang and R. Munos, "On a few
    pitfalls in KL divergence gradient estimation for RL", arXiv:2506.09477.

    Args:
        logprobs: [N] nats, of pi; may require grad.
        reference: [N] nats, of pi_ref; without gradient.
        estimator: of `KL_ESTIMATORS`, for the value.
    Returns: [N] nats.
    Raises: ValueError: there is no such estimator.
    """
    difference = logprobs - reference.detach()
    half_square = difference.square() / 2
    constant = difference.detach()
    if estimator == "k1":
        value = constant
    elif estimator == "k2":
        value = half_square.detach()
    elif estimator == "k3":
        value = ratio_divergence(-constant)
    else:
        raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(KL_ESTIMATORS)}")
    return value + (half_square - half_square.detach())


def ratio_divergence(log_ratio: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r >= 0 of ratios r that are given by their logarithms, and finite for each."""
    return torch.expm1(log_ratio.clamp(max=_MOST_NATS)) - log_ratio


def sampled_kl(tokens: RowTokens, *, estimator: str) -> torch.Tensor:
    """[N] `kl_estimate` of the policy that sampled, from the reference: a token function.

    Args: tokens: with fields `behavior_logprobs` and `reference_logprobs`.
    """
    fields = tokens.fields
    return kl_estimate(fields["behavior_logprobs"], fields["reference_logprobs"], estimator)
