"""A loss that reads what a second model says of the tokens; workers find it beside the script."""

from __future__ import annotations

import torch

from areal_sc.algorithms.losses import LossTokens, Metric, Metrics


def to_reference(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """A policy gradient with a penalty for leaving the reference model (Schulman's k2)."""
    gap = tokens.logprobs - tokens.fields["reference_logprobs"]
    loss = (0.1 * gap.square() / 2 - tokens.fields["advantages"] * tokens.logprobs).sum()
    return loss / tokens.num_loss_tokens, {"gap": Metric.max(gap.abs())}
