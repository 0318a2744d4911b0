"""The policy-gradient loss: its parts are switches, and a preset is a choice of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from areal_sc.algorithms.behavior_weights import (
    bounded_weights,
    exceeds_behavior_kl,
    exceeds_second_moment,
    is_outside_of_row,
)
from areal_sc.algorithms.gains import (
    Gains,
    GainTerms,
    clip_gain,
    divergence_gain,
    plain_gain,
    soft_gate_gain,
    stop_gradient_clip_gain,
)
from areal_sc.algorithms.kl import kl_estimate, ratio_divergence
from areal_sc.algorithms.loss_tokens import LossTokens
from areal_sc.algorithms.losses import Metric, Metrics
from areal_sc.algorithms.ratios import interpolated_logprobs, sequence_log_ratio

_MOST_LOG_WEIGHT: Final = 5.0
"""A token weighs no more than exp of this in the KL: where training and generation disagree on one,
it must not outweigh all others."""


def policy_gradient(
    tokens: LossTokens,
    *,
    ratio: str = "token",
    gain: str = "clip",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_dual: float = math.inf,
    gate_positive: float = 1.0,
    gate_negative: float = 1.05,
    divergence: str = "tv",
    max_divergence: float = math.inf,
    clip_center: str = "proximal",
    behavior_weight: str = "token",
    behavior_weight_bound: str = "mask",
    behavior_weight_floor: float = 0.0,
    behavior_weight_cap: float = math.inf,
    max_second_moment: float = math.inf,
    max_behavior_kl: float = math.inf,
    row_filter: Mapping[str, Any] | None = None,
    aggregation: str = "token",
    aggregation_tokens: int = 0,
    kl_coefficient: float = 0.0,
    kl_estimator: str = "k1",
    entropy_coefficient: float = 0.0,
) -> tuple[torch.Tensor, Metrics]:
    """L = mean_t(-g(r_t, A_t, w_t)) + beta mean_t(v_t kl_t) - c mean_t(H_t).

    r = pi_theta / pi_centre; w = pi_centre / pi_behav and v = pi_theta / pi_behav, both without
    gradient, so that the KL is that of the trained policy also on stale rows; g is a gain of
    `algorithms.gains`. By default this is decoupled PPO (AReaL, arXiv:2505.24298, eq. 5):
    L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / num_loss_tokens.
    docs/algorithms.md says which paper stands behind each switch.

    Args:
        tokens: with fields `advantages`, and as far as they are used `proximal_logprobs`,
            `behavior_logprobs`, `reference_logprobs`, `staleness`.
        ratio: `token`; or `sequence`: the geometric mean over a row.
        gain: `clip`, `stop_gradient_clip`, `soft_gate`, `divergence`, `none`.
        clip_low, clip_high: how far r may fall below and rise above 1 before the gain is cut.
        clip_dual: with gain `clip`, where A < 0, r counts as no more than this.
        gate_positive, gate_negative: temperatures of gain `soft_gate`.
        divergence, max_divergence: of gain `divergence`: `tv` or `kl`, and its limit.
        clip_center: `proximal`; `behavior`: w is 1 then; or `interpolated` between the sampling
            policy and the trained one.
        behavior_weight: `token`; `sequence`: the geometric mean over a row; `product`: over a row,
            its importance as a whole; `none`: w is 1.
        behavior_weight_bound: what becomes of w outside of floor and cap: `mask`: the token leaves
            the numerator, not the denominator; `clamp`.
        max_second_moment, max_behavior_kl: see `algorithms.behavior_weights`.
        row_filter: arguments of `is_outside_of_row`; its d is that of w, or with clip_center
            `behavior` log pi_theta / pi_behav. Empty: there is none.
        aggregation: `token`, `sequence`, `episode`, `prompt`: what counts the same in the means of
            the loss, see `LossTokens.mean`; `constant`: they are sums over the tokens, divided by
            episodes * aggregation_tokens, so that no answer's length matters (Dr. GRPO,
            arXiv:2503.20783).
        aggregation_tokens: of `constant`, > 0: the most tokens of an answer, for example.
        kl_coefficient, kl_estimator: beta, and the KL to a reference, see `kl.kl_estimate`.
        entropy_coefficient: c.
    Returns: scalar loss, and metrics of these tokens: the means `clip_fraction` (the gain was cut),
        `capped_fraction` (dropped by a weight or filter), `ratio`, `abs_advantage`,
        `behavior_weight` (as used: 0 where dropped), and of r - 1 - log r, a divergence estimate,
        `proximal_kl`, and the same of w, `behavior_kl` (0 for dropped tokens), and of the squares
        of the weights, `behavior_weight_square`; the largest ratio and weight, `ratio_max` and
        `behavior_weight_max`; with `clamp` the mean `clamped_fraction` (w was out of bounds); and
        with a KL to a reference the mean of v_t kl_t, `reference_kl`.
    """

    def mean(values: torch.Tensor) -> torch.Tensor:
        if aggregation == "constant":
            return values.sum() / (tokens.counts.episodes * aggregation_tokens)
        return tokens.mean(values, aggregation)

    logprobs, advantages = tokens.logprobs, _field(tokens, "advantages")
    if clip_center == "interpolated":
        behavior = _field(tokens, "behavior_logprobs")
        center = interpolated_logprobs(logprobs, behavior, tokens.fields["staleness"])
    else:
        center = _field(tokens, f"{clip_center}_logprobs")
    own = _log_weight(tokens, center, "none" if clip_center == "behavior" else behavior_weight)
    weight, log_weight, is_dropped = bounded_weights(
        own,
        floor=behavior_weight_floor,
        cap=behavior_weight_cap,
        is_clamped=behavior_weight_bound == "clamp",
    )
    metrics = {}
    if behavior_weight_bound == "clamp":
        metrics["clamped_fraction"] = Metric.mean(log_weight != own)
    for exceeds, limit in (
        (exceeds_second_moment, max_second_moment),
        (exceeds_behavior_kl, max_behavior_kl),
    ):
        if limit < math.inf:
            away = _away(tokens, logprobs.detach())
            is_dropped = is_dropped | exceeds(away, advantages, tokens.rows, limit)
    if row_filter:
        away = _away(tokens, logprobs.detach() if clip_center == "behavior" else center)
        is_dropped = is_dropped | is_outside_of_row(away, tokens.rows, **row_filter)
    log_ratio = logprobs - center
    if ratio == "sequence":
        log_ratio = sequence_log_ratio(log_ratio, tokens.rows)
    terms = GainTerms(
        logprobs,
        log_ratio,
        log_ratio.detach().exp(),
        advantages,
        weight.masked_fill(is_dropped, 0.0),
        log_weight.masked_fill(is_dropped, 0.0),
        is_dropped,
    )
    by_name: dict[str, Callable[[], Gains]] = {
        "clip": lambda: clip_gain(terms, clip_low, clip_high, clip_dual),
        "stop_gradient_clip": lambda: stop_gradient_clip_gain(terms, clip_low, clip_high),
        "soft_gate": lambda: soft_gate_gain(terms, gate_positive, gate_negative),
        "divergence": lambda: divergence_gain(terms, max_divergence, divergence),
        "none": lambda: plain_gain(terms),
    }
    gains, is_clipped = by_name[gain]()
    loss, metrics = -mean(gains), metrics | _metrics(terms, is_clipped)
    if kl_coefficient:
        kl = kl_estimate(logprobs, _field(tokens, "reference_logprobs"), kl_estimator)
        kl = _away(tokens, logprobs.detach()).clamp(max=_MOST_LOG_WEIGHT).exp() * kl
        loss = loss + kl_coefficient * mean(kl)
        metrics["reference_kl"] = Metric.mean(kl)
    if entropy_coefficient:
        loss = loss - entropy_coefficient * mean(tokens.entropy)
    return loss, metrics


@torch.no_grad()
def _metrics(terms: GainTerms, is_clipped: torch.Tensor) -> dict[str, Metric]:
    """What every such loss reports."""
    return {
        "clip_fraction": Metric.mean(is_clipped),
        "capped_fraction": Metric.mean(terms.is_dropped),
        "ratio": Metric.mean(terms.ratio),
        "ratio_max": Metric.max(terms.ratio),
        "behavior_weight": Metric.mean(terms.weight),
        "behavior_weight_max": Metric.max(terms.weight),
        "behavior_weight_square": Metric.mean(terms.weight.square()),
        "abs_advantage": Metric.mean(terms.advantages.abs()),
        "proximal_kl": Metric.mean(ratio_divergence(terms.log_ratio)),
        "behavior_kl": Metric.mean(ratio_divergence(terms.log_weight)),
    }


def _field(tokens: LossTokens, name: str) -> torch.Tensor:
    return tokens.fields[name].detach().to(tokens.logprobs.dtype)


def _away(tokens: LossTokens, policy: torch.Tensor) -> torch.Tensor:
    """[N] nats, how much likelier the tokens are to a policy than to the one that sampled them."""
    return policy - _field(tokens, "behavior_logprobs")


def _log_weight(tokens: LossTokens, center: torch.Tensor, of: str) -> torch.Tensor:
    """[N] nats: log w, before anything bounds it. Args: of: see `behavior_weight`."""
    if of == "none":
        return center - center  # what is not finite stays known
    log_weight = _away(tokens, center)
    if of == "token":
        return log_weight
    over = tokens.rows.mean if of == "sequence" else tokens.rows.sum
    return tokens.rows.spread(over(log_weight))
