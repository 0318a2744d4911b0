"""The losses that the Tinker API names: sums over tokens, as its documentation defines them.

Source: https://tinker-docs.thinkingmachines.ai/losses
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metrics

WEIGHTS: Final = "token_weights"
SAMPLED: Final = "sampled_logprobs"
ADVANTAGES: Final = "token_advantages"

FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    "cross_entropy": {WEIGHTS: "weights"},
    **{
        name: {SAMPLED: "logprobs", ADVANTAGES: "advantages"}
        for name in ("importance_sampling", "ppo", "cispo", "dro")
    },
}
"""By the name of a loss, the fields that it reads, and what the API calls them."""

SETTINGS: Final[Mapping[str, Mapping[str, float]]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "dro": {"beta": 0.05},
}
"""What `loss_fn_config` may set, and what it is otherwise."""


def token_losses(
    name: str,
    logprobs: torch.Tensor,
    fields: Mapping[str, torch.Tensor],
    settings: Mapping[str, float],
) -> torch.Tensor:
    """[N] the loss of each token.

    Args:
        logprobs: [N] of the model that is trained, nats.
        fields: [N] each, those of `FIELDS`.
        settings: all of `SETTINGS`.
    """
    if name == "cross_entropy":
        return -fields[WEIGHTS] * logprobs
    gaps, advantages = logprobs - fields[SAMPLED], fields[ADVANTAGES]
    if name == "dro":
        return settings["beta"] / 2 * gaps.square() - logprobs * advantages
    ratio = gaps.exp()
    if name == "importance_sampling":
        return -ratio * advantages
    clipped = ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
    if name == "cispo":
        return -clipped.detach() * logprobs * advantages
    return -torch.minimum(ratio * advantages, clipped * advantages)


def summed(tokens: LossTokens, *, name: str, **settings: float) -> tuple[torch.Tensor, Metrics]:
    """The loss of an update: the sum over all tokens."""
    fields = {field: tokens.fields[field] for field in FIELDS[name]}
    return token_losses(name, tokens.logprobs, fields, settings).sum(), {}
