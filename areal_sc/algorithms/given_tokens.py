"""Tokens of one row that are trained in two ways: those that the policy sampled, and given ones."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import torch

from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric, Metrics
from areal_sc.algorithms.named_loss import needed_fields
from areal_sc.algorithms.policy_gradient import policy_gradient
from areal_sc.token_fields import GIVEN_WEIGHTS


def policy_gradient_and_cross_entropy(
    tokens: LossTokens, **settings: Any
) -> tuple[torch.Tensor, Metrics]:
    """The policy-gradient loss of sampled tokens, and a weighted cross entropy of given ones.

    L = policy_gradient(sampled tokens) - sum_(given t) v_t log pi_t / D

    where v are the field `given_weights`, 0 at sampled tokens, and D is the denominator of both,
    `num_loss_tokens` or that of `constant`. So what a tool has answered, or a teacher has written
    into a row, is learned beside what the policy did with it.
    Source: world-model tokens in agents' rows, as prime-rl's ECHO trains them.

    Args:
        tokens: with field `given_weights`, [N] float32, and those of `policy_gradient`.
        settings: of `policy_gradient`; `aggregation` is `token` or `constant`.
    Returns: scalar loss, and the metrics of `policy_gradient` over sampled tokens, and over given
        ones the mean `given_cross_entropy`, nats.
    Raises: ValueError: another aggregation.
    """
    aggregation = settings.get("aggregation", "token")
    if aggregation not in ("token", "constant"):
        raise ValueError(f"aggregation: expected token or constant, got {aggregation!r}")
    weights = tokens.fields[GIVEN_WEIGHTS].to(tokens.logprobs.dtype)
    is_given = weights != 0
    loss, metrics = policy_gradient(_take(tokens, ~is_given, settings), **settings)
    surprise, denominator = -tokens.logprobs[is_given], tokens.num_loss_tokens
    if aggregation == "constant":
        denominator = tokens.counts.episodes * settings["aggregation_tokens"]
    loss = loss + (weights[is_given] * surprise).sum() / denominator
    return loss, {**metrics, "given_cross_entropy": Metric.mean(surprise)}


policy_gradient_and_cross_entropy.__signature__ = inspect.signature(policy_gradient)  # type: ignore[attr-defined]


def _take(tokens: LossTokens, keep: torch.Tensor, settings: dict[str, Any]) -> LossTokens:
    """These tokens alone, in the rows that they stand in."""
    rows = tokens.rows
    of_token = rows.of_token[keep]
    return replace(
        tokens,
        logprobs=tokens.logprobs[keep],
        entropy=tokens.entropy[keep],
        fields={name: tokens.fields[name][keep] for name in needed_fields(settings)},
        rows=replace(
            rows,
            of_token=of_token,
            position=rows.position[keep],
            num_loss_tokens=torch.bincount(of_token, minlength=len(rows.num_tokens)),
        ),
    )
