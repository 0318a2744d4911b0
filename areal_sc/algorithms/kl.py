"""Estimates of the divergence from a reference policy, from the sampled tokens alone."""

from __future__ import annotations

import torch

from areal_sc.algorithms.loss_tokens import RowTokens

KL_ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """An estimate of KL(pi || pi_ref) for each token that pi has sampled.

    With d = log pi - log pi_ref: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The expected values
    of k1 and k3 are the divergence. The gradient of k2 is, in expectation, that of the divergence;
    the gradient of k1 is 0 in expectation, so that k1 is no penalty in a loss.
    Source: J. Schulman, "Approximating KL Divergence" (2020); k3 as in GRPO, arXiv:2402.03300,
    eq. 4.

    Args:
        logprobs: [N] nats, of pi; may require grad.
        reference: [N] nats, of pi_ref; without gradient.
        estimator: of `KL_ESTIMATORS`.
    Returns: [N] nats.
    Raises: ValueError: there is no such estimator.
    """
    difference = logprobs - reference.detach()
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    if estimator == "k3":
        return torch.expm1(-difference) + difference
    raise ValueError(f"estimator={estimator!r}: expected one of {', '.join(KL_ESTIMATORS)}")


def sampled_kl(tokens: RowTokens, *, estimator: str) -> torch.Tensor:
    """[N] `kl_estimate` of the policy that sampled, from the reference: a token function.

    Args: tokens: with fields `behavior_logprobs` and `reference_logprobs`.
    """
    fields = tokens.fields
    return kl_estimate(fields["behavior_logprobs"], fields["reference_logprobs"], estimator)
