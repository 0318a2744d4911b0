"""Weights that correct for the policy that sampled, and filters of what it makes useless."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from areal_sc.algorithms.loss_tokens import LossRows

_MOST_LOG_WEIGHT: Final = 300.0
"""So that sums of exponentials stay finite in float64."""

_MOST_SQUARE: Final = 1e6
"""Squared log-ratios count as no more than this, so that sums over rows stay exact and finite."""


def bounded_weights(
    log_weight: torch.Tensor, *, floor: float, cap: float, is_clamped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights w = pi_prox / pi_behav within [floor, cap].

    Those outside of it are clamped to its ends (TIS: F. Yao et al., "Your Efficient RL Framework
    Secretly Brings You Off-Policy RL Training", 2025: min(w, C)), or are dropped (IcePop,
    arXiv:2510.18855: M(w) = w if floor <= w <= cap, else 0).

    Args:
        log_weight: [N] nats, without gradient.
        floor, cap: 0 <= floor <= cap; the cap may be infinite.
        is_clamped: else they are dropped.
    Returns: [N] weights, 0 where dropped; [N] their logarithms, 0 where dropped; [N] bool, where
        they are dropped. A weight that is NaN is dropped in any case.
    """
    if is_clamped:
        least = math.log(floor) if floor > 0 else -math.inf
        log_weight = log_weight.clamp(least, math.log(cap))
        is_dropped = log_weight.isnan()
        weight = log_weight.exp()
    else:
        weight = log_weight.exp()
        is_dropped = ~(weight <= cap)  # so that NaN, too, is over the cap
        if floor > 0:
            is_dropped |= weight < floor
    return (
        weight.masked_fill(is_dropped, 0.0),
        log_weight.masked_fill(is_dropped, 0.0),
        is_dropped,
    )


def is_outside_of_row(
    log_weight: torch.Tensor,
    rows: LossRows,
    *,
    of: str = "ratio",
    over: str = "geometric_mean",
    low: float = -math.inf,
    high: float = math.inf,
    also: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """Tokens of rows that are too far from the policy that sampled them.

    With d = log(pi / pi_behav) a token is exp(d) (`ratio`), exp(|d|) (`error`), -d (`k1`), d^2 / 2
    (`k2`) or exp(d) - 1 - d (`k3`), of which the last three estimate KL(pi_behav || pi). A row is
    their mean, sum, largest or smallest one over its trained tokens; of the ratio also their
    product or geometric mean. All tokens of a row outside of [low, high] have to go; with `token`
    those alone that are outside themselves. So `product` rejects by the whole answer's importance,
    and `min` a row with one token that the policy would hardly sample.
    Source: Y. Liu, J. Li et al., "When Speed Kills Stability", 2025 (sequence and geometric
    rejection); the estimates: J. Schulman, "Approximating KL divergence", 2020.

    Args:
        log_weight: [N] d in nats, without gradient.
        also: arguments of another filter: what it rejects goes, too.
    Returns: [N] bool. A row of which that is NaN goes.
    """
    d = log_weight.double()
    if over in ("product", "geometric_mean"):
        of_rows = (rows.sum(d) if over == "product" else rows.mean(d)).exp()
    else:
        ratio = d.clamp(max=_MOST_LOG_WEIGHT).exp()
        error = d.abs().clamp(max=_MOST_LOG_WEIGHT).exp()
        estimates = {"k1": -d, "k2": d.square() / 2, "k3": ratio - 1 - d}
        values = {"ratio": ratio, "error": error, **estimates}[of]
        if over == "token":
            of_rows = values
        elif over in ("mean", "sum"):
            of_rows = rows.mean(values) if over == "mean" else rows.sum(values)
        else:
            empty = values.new_zeros(len(rows.num_tokens))
            of_rows = empty.scatter_reduce(0, rows.of_token, values, f"a{over}", include_self=False)
    is_outside = ~((of_rows >= low) & (of_rows <= high))
    is_outside = is_outside if over == "token" else rows.spread(is_outside)
    return is_outside if also is None else is_outside | is_outside_of_row(log_weight, rows, **also)


def exceeds_second_moment(
    log_ratio: torch.Tensor, advantages: torch.Tensor, rows: LossRows, limit: float
) -> torch.Tensor:
    """The tokens that have to go, largest first, until a row's mean of log_ratio^2 is <= limit.

    Only tokens that move away from the sampling policy count: A > 0 and r > 1, or A < 0 and r < 1.
    Source: M2PO, arXiv:2510.01161, algorithm 1, which takes the mean over a batch. Here it is over
    a row's tokens, so that the choice does not depend on how rows are cut into micro-batches; where
    each row keeps the limit, the batch does.

    Args:
        log_ratio: [N] log pi_theta - log pi_behav, without gradient.
        advantages: [N].
        limit: > 0.
    Returns: [N] bool.
    """
    is_leaving = ((advantages > 0) & (log_ratio > 0)) | ((advantages < 0) & (log_ratio < 0))
    places = is_leaving.nonzero()[:, 0]
    squares = log_ratio[places].double().square().clamp(max=_MOST_SQUARE)
    order = squares.argsort()
    order = order[rows.of_token[places[order]].argsort(stable=True)]
    squares, places = squares[order], places[order]
    row_counts = torch.bincount(rows.of_token[places], minlength=len(rows.num_tokens))
    ends = row_counts.cumsum(0)
    starts = (ends - row_counts).repeat_interleave(row_counts)
    sums = torch.cat([squares.new_zeros(1), squares.cumsum(0)])
    sums = sums[1:] - sums[starts]
    counts = torch.arange(1, len(places) + 1, device=places.device) - starts
    exceeds = torch.zeros_like(is_leaving)
    exceeds[places] = sums > limit * counts
    return exceeds


def exceeds_behavior_kl(
    log_ratio: torch.Tensor, advantages: torch.Tensor, rows: LossRows, limit: float
) -> torch.Tensor:
    """Tokens of negative advantage in rows that are too unlikely by now.

    M_it = 0 where A_it < 0 and mean_t log(pi_behav / pi_theta) > limit.
    Source: DeepSeek-V3.2, arXiv:2512.02556.

    Args:
        log_ratio: [N] log pi_theta - log pi_behav, without gradient.
        advantages: [N].
        limit: nats a token.
    Returns: [N] bool.
    """
    return (advantages < 0) & rows.spread(-rows.mean(log_ratio) > limit)
