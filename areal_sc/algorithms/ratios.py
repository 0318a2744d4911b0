"""The ratio of the trained policy to the clip's centre, of a token or of a whole row."""

from __future__ import annotations

import torch

from areal_sc.algorithms.loss_tokens import LossRows


def sequence_log_ratio(log_ratio: torch.Tensor, rows: LossRows) -> torch.Tensor:
    """The log-ratio of each token's row, whose gradient goes to the token itself.

    s_it = sg[s_i] pi_it / sg[pi_it], s_i = (prod_t pi_it / pi_old_it)^(1 / |y_i|).
    Source: GSPO, arXiv:2507.18071, eq. 14 (GSPO-token). Where the tokens of a row have one
    advantage and one weight, loss and gradient are those of s_i itself (eq. 7).

    Args:
        log_ratio: [N] nats, requires grad.
    Returns: [N].
    """
    constant = log_ratio.detach()
    return rows.spread(rows.mean(constant)) + (log_ratio - constant)


def interpolated_logprobs(
    logprobs: torch.Tensor, behavior: torch.Tensor, staleness: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of a proximal policy that no forward pass computes; without gradient.

    log pi_prox = (1 - a) log pi_behav + a log pi_theta, a = (d - 1) / d, and 0 where d = 0.
    Source: A-3PO, arXiv:2512.06547.

    Args:
        logprobs, behavior: [N] nats.
        staleness: [N] d, policy versions between the token and the policy that is trained.
    Returns: [N].
    """
    versions = staleness.to(logprobs.dtype).clamp(min=1)
    return behavior + (1 - 1 / versions) * (logprobs.detach() - behavior)
