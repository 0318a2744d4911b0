"""Advantages a token: rewards, values, discounts. Rows of tokens in, rows of tokens out."""

from __future__ import annotations

from typing import Any

import torch

from areal_sc.algorithms.kl import sampled_kl
from areal_sc.algorithms.loss_tokens import LossTokens, RowTokens
from areal_sc.algorithms.losses import Metric, Metrics


def token_rewards(
    returns: torch.Tensor,
    row_tokens: torch.Tensor,
    kl: torch.Tensor | None = None,
    kl_coefficient: float = 0.0,
) -> torch.Tensor:
    """The reward of each trained token: the row's at its last one, and -beta kl at every one.

    Where answers have returns of their own, the last token of one has what its return is more than
    that of the next one, so that the rewards to go are the returns.
    Source: arXiv:1909.08593, eq. 2, a token (InstructGPT, arXiv:2203.02155, appendix C).

    Args:
        returns: [N], of each trained token's answer or row.
        row_tokens: [R] int64, trained tokens of each row, >= 1.
        kl: [N] estimates of the divergence from a reference; None: none.
    Returns: [N].
    """
    later = returns.roll(-1)
    later[row_tokens.cumsum(0) - 1] = 0
    rewards = returns - later
    return rewards if kl is None else rewards.to(kl.dtype) - kl_coefficient * kl


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    row_tokens: torch.Tensor,
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
) -> torch.Tensor:
    """A_t = sum_l (discount gae_lambda)^l delta_(t+l), delta_t = r_t + discount V_(t+1) - V_t.

    After a row's last trained token V is 0. With values of 0 and gae_lambda of 1 these are the
    returns to go; returns for a critic are A + V.
    Source: GAE, arXiv:1506.02438, eq. 11 to 16.

    Args:
        rewards, values: [N], of the trained tokens, row by row.
        row_tokens: [R] int64, trained tokens of each row, >= 1.
        discount, gae_lambda: of [0, 1].
    Returns: [N].
    """
    starts = row_tokens.cumsum(0) - row_tokens
    advantages = torch.zeros_like(values)
    running = values.new_zeros(len(row_tokens))
    following = values.new_zeros(len(row_tokens))
    for place in range(int(row_tokens.max()) - 1 if len(row_tokens) else -1, -1, -1):
        has_token = place < row_tokens
        here = (starts + place)[has_token]
        delta = rewards[here] + discount * following[has_token] - values[here]
        running[has_token] = delta + discount * gae_lambda * running[has_token]
        following[has_token] = values[here]
        advantages[here] = running[has_token]
    return advantages


def token_advantages(
    tokens: RowTokens,
    *,
    discount: float = 1.0,
    gae_lambda: float = 1.0,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k1",
) -> torch.Tensor:
    """Advantages from a critic's values; a KL to the reference is a part of the reward.

    Args:
        tokens: with field `values`, and with a KL `behavior_logprobs` and `reference_logprobs`.
        discount, gae_lambda: see `generalized_advantages`.
        kl_coefficient, kl_estimator: see `token_rewards` and `kl.kl_estimate`.
    Returns: [N].
    """
    fields, rows = tokens.fields, tokens.rows
    row_tokens = torch.bincount(rows.of_token, minlength=len(rows.num_tokens))
    kl = None
    if kl_coefficient:
        kl = sampled_kl(tokens, estimator=kl_estimator)
    rewards = token_rewards(tokens.returns, row_tokens, kl, kl_coefficient)
    values = fields["values"]
    return generalized_advantages(
        rewards.to(values.dtype), values, row_tokens, discount=discount, gae_lambda=gae_lambda
    )


def token_returns(tokens: RowTokens, **settings: Any) -> torch.Tensor:
    """What a critic learns: the advantages and the values that they came from, A + V.

    Args: those of `token_advantages`.
    Returns: [N].
    """
    return token_advantages(tokens, **settings) + tokens.fields["values"]


def clipped_squared_error(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float
) -> torch.Tensor:
    """max((V - R)^2, (clip(V, V_old - eps, V_old + eps) - R)^2) / 2, a token.

    Source: the value loss of PPO's published code (arXiv:2005.12729, section 3).

    Args:
        values: [N], require grad. old_values, returns: [N], without.
        clip: eps, > 0; inf: the squared error alone.
    Returns: [N].
    """
    error = (values - returns).square()
    if clip == float("inf"):
        return error / 2
    near = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return torch.maximum(error, (near - returns).square()) / 2


def value_loss(tokens: LossTokens, *, value_clip: float = 0.2) -> tuple[torch.Tensor, Metrics]:
    """A critic's loss: the token-mean of `clipped_squared_error`.

    Args:
        tokens: with `values`, and fields `values`, those before the first minibatch, and `returns`.
    Returns: scalar loss, and the means `value`, `return`, `return_square`, `value_error` (squared),
        and `value_clip_fraction`; see `named_advantage.explained_variance`.
    Raises: ValueError: the model has no value head.
    """
    values = tokens.predicted_values
    old, returns = (tokens.fields[name].detach().to(values.dtype) for name in ("values", "returns"))
    errors = clipped_squared_error(values, old, returns, value_clip)
    plain = (values - returns).detach().square()
    return errors.sum() / tokens.num_loss_tokens, {
        "value": Metric.mean(values),
        "return": Metric.mean(returns),
        "return_square": Metric.mean(returns.square()),
        "value_error": Metric.mean(plain),
        "value_clip_fraction": Metric.mean(2 * errors.detach() > plain),
    }
