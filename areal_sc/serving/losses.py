"""The losses that the Tinker API names: sums over tokens, as its documentation defines them.

Rows of several models, each with a loss of its own, are computed together, so each token says what
its loss is.

Source: https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metrics

LOSSES: Final = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
"""Their names; a token's `LOSS` is the place of one here."""

GAINS: Final = "token_gains"
SAMPLED: Final = "sampled_logprobs"
LOSS: Final = "token_loss"
LOW: Final = "loss_low"
HIGH: Final = "loss_high"
FIELDS: Final = (GAINS, SAMPLED, LOSS, LOW, HIGH)
"""Fields that each token has."""

INPUTS: Final[Mapping[str, Mapping[str, str]]] = {
    "cross_entropy": {GAINS: "weights"},
    **{name: {SAMPLED: "logprobs", GAINS: "advantages"} for name in LOSSES[1:]},
}
"""By the name of a loss, the fields that a client gives, and what the API calls them."""

SETTINGS: Final[Mapping[str, Mapping[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
"""What `loss_fn_config` may set, and what it is otherwise; in the order of `LOW` and `HIGH`."""


def by_token(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose loss and settings are one number each, with one a token, [T]."""
    length = len(row["input_ids"])
    return {**row, **{name: [row[name]] * length for name in (LOSS, LOW, HIGH)}}


def token_losses(logprobs: torch.Tensor, fields: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """[N] the loss of each token.

    Args:
        logprobs: [N] of the model that is trained, nats.
        fields: [N] each of `FIELDS`.
    """
    gains, low, high = fields[GAINS], fields[LOW], fields[HIGH]
    losses = torch.zeros_like(logprobs)
    for number, name in enumerate(LOSSES):
        is_its = fields[LOSS] == number
        if not bool(is_its.any()):
            continue
        gaps = torch.where(is_its, logprobs - fields[SAMPLED], 0.0)
        ratio = gaps.exp()
        if name == "cross_entropy":
            its = -gains * logprobs
        elif name == "importance_sampling":
            its = -ratio * gains
        elif name == "ppo":
            its = -torch.minimum(ratio * gains, ratio.clamp(low, high) * gains)
        elif name == "cispo":
            its = -ratio.clamp(low, high).detach() * logprobs * gains
        else:
            its = low / 2 * gaps.square() - logprobs * gains
        losses = torch.where(is_its, its, losses)
    return losses


def summed(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """The loss of an update: the sum over all tokens."""
    fields = {field: tokens.fields[field] for field in FIELDS}
    return token_losses(tokens.logprobs, fields).sum(), {}
