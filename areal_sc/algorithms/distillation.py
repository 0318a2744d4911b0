"""The loss by which a student follows a teacher."""

from __future__ import annotations

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric, Metrics


def reverse_kl(tokens: LossTokens, *, ratio_cap: float = 5.0) -> tuple[torch.Tensor, Metrics]:
    """Token-mean of r_t sg[log pi_t - log pi_teacher_t], r = pi / pi_behav.

    Its gradient is that of KL(pi || pi_teacher) on tokens that the student has sampled, corrected
    for what it was when it sampled them.
    Source: on-policy distillation, arXiv:2306.13649 (GKD), reverse KL; K. Lu et al.,
    "On-Policy Distillation" (Thinking Machines, 2025).

    Args:
        tokens: with fields `teacher_logprobs` and `behavior_logprobs`.
        ratio_cap: tokens with a larger r leave the numerator.
    Returns: scalar loss, and the means `teacher_kl` (of log pi - log pi_teacher),
        `capped_fraction` and `ratio`.
    """
    dtype = tokens.logprobs.dtype
    difference = tokens.logprobs.detach() - tokens.fields["teacher_logprobs"].detach().to(dtype)
    log_ratio = tokens.logprobs - tokens.fields["behavior_logprobs"].detach().to(dtype)
    ratio = log_ratio.detach().exp()
    is_capped = ~(ratio <= ratio_cap)
    moving = log_ratio.masked_fill(is_capped, 0.0).exp()
    values = (moving * difference).masked_fill(is_capped, 0.0)
    return values.sum() / tokens.num_loss_tokens, {
        "teacher_kl": Metric.mean(difference),
        "capped_fraction": Metric.mean(is_capped),
        "ratio": Metric.mean(ratio),
    }
