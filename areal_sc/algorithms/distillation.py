"""The losses by which a student follows a teacher."""

from __future__ import annotations

from typing import Final, Literal

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric, Metrics
from areal_sc.algorithms.named_loss import TOP_K
from areal_sc.token_fields import TOP_LOGPROBS, TOP_TOKENS

_LEAST_REST: Final = torch.finfo(torch.float32).eps
"""Least probability of the tokens beyond the k: it is 1 less a sum, with the rounding of that."""


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


def top_k_kl(
    tokens: LossTokens, *, top_k: int = TOP_K, direction: Literal["forward", "reverse"] = "forward"
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean divergence of student p and teacher q over k tokens, and the rest as one more.

    sum_i a_i (log a_i - log b_i), i = 1 .. k + 1, a_(k+1) = 1 - sum_(i <= k) a_i, where the k
    tokens are the teacher's most probable ones. It is a lower bound of the divergence over the
    whole vocabulary.
    Source: generalized knowledge distillation, arXiv:2306.13649, eq. 2 and 3.

    Args:
        tokens: with fields `teacher_top_logprobs` and `teacher_top_tokens`.
        top_k: k; where the rows have more tokens, the first ones.
        direction: `forward`: KL(q || p), a = q, which covers all that the teacher would say;
            `reverse`: KL(p || q), a = p.
    Returns: scalar loss, and the means `teacher_kl`, which is the loss of a token, and `rest`, the
        student's probability of the tokens beyond the k.
    Raises: ValueError: the rows have no such tokens, or fewer.
    """
    student, teacher = tokens.top_logprobs, tokens.fields[TOP_LOGPROBS]
    asked = tokens.fields[TOP_TOKENS]
    if student is None or not len(student):  # a rank without rows does not know their fields
        student = teacher = asked = tokens.logprobs.new_zeros(0, top_k)
    if student.shape[1] < top_k or not student.shape == teacher.shape == asked.shape:
        raise ValueError(
            f"expected a teacher's log-probabilities of {top_k} tokens at each place, got "
            f"{tuple(teacher.shape)} of {tuple(asked.shape)}"
        )
    own, others = (_with_rest(it[:, :top_k].to(student.dtype)) for it in (student, teacher))
    chosen, other = (own, others) if direction == "reverse" else (others, own)
    values = (chosen.exp() * (chosen - other)).sum(-1)
    return values.sum() / tokens.num_loss_tokens, {
        "teacher_kl": Metric.mean(values),
        "rest": Metric.mean(own[:, -1].exp()),
    }


def _with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """[N, k + 1] of [N, k]: also that of all other tokens together."""
    rest = -logprobs.logsumexp(-1, keepdim=True).expm1()
    return torch.cat([logprobs, rest.clamp(min=_LEAST_REST).log()], -1)
