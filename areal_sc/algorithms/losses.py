"""Losses over trained tokens. Those of micro-batches and ranks add up to that of the minibatch.

A loss is a function `(tokens, **settings) -> (scalar loss, metrics)`: `named_loss` tells how it is
named. Its denominators are `tokens.counts`, not the number of tokens that it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch

from areal_sc.algorithms.loss_tokens import LossTokens as LossTokens


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of one micro-batch that knows how it becomes one of the whole step.

    Attributes:
        value: scalar float32, without gradient. Of a mean: the sum over the tokens.
        combine: over micro-batches and ranks a `sum` adds up, a `max` is the largest one, and a
            `mean` is the sum of the values over that of the weights.
        weight: of a mean: number of tokens.
    """

    value: torch.Tensor
    combine: Literal["mean", "sum", "max"]
    weight: float = 0.0

    @classmethod
    def mean(cls, values: torch.Tensor) -> Metric:
        """Args: values: [T], one a token."""
        return cls(values.detach().sum().float(), "mean", values.numel())

    @classmethod
    def sum(cls, values: torch.Tensor) -> Metric:
        """Args: values: [T], one a token."""
        return cls(values.detach().sum().float(), "sum")

    @classmethod
    def max(cls, values: torch.Tensor) -> Metric:
        """Args: values: [T] >= 0; without any, the largest one is 0."""
        largest = values.detach().max() if values.numel() else values.new_zeros(())
        return cls(largest.float(), "max")

    def __add__(self, other: Metric) -> Metric:
        """The metric of both micro-batches together."""
        if self.combine == "max":
            return replace(self, value=torch.maximum(self.value, other.value))
        return replace(self, value=self.value + other.value, weight=self.weight + other.weight)


Metrics = dict[str, Metric]
"""By the names under which a step reports them; each micro-batch and rank may have its own."""


_OWN: Final = frozenset(
    (
        *("loss", "entropy", "grad_norm", "lr", "num_tokens", "num_loss_tokens", "num_updates"),
        *("num_effective_tokens", "num_skipped_updates", "num_micro_batches"),
    )
)
"""Numbers that a step reports whatever its loss does."""


def checked(returned: Any) -> tuple[torch.Tensor, Metrics]:
    """What a loss has returned. Raises: TypeError: it is no scalar with metrics."""
    match returned:
        case (torch.Tensor() as value, dict() as metrics) if value.numel() == 1:
            pass
        case _:
            what = f"{returned!s:.200}"
            raise TypeError(f"expected a scalar tensor and a dict of metrics, got {what}")
    for name, metric in metrics.items():
        match metric:
            case Metric(value=torch.Tensor() as number, combine="mean" | "sum" | "max") if (
                number.numel() == 1
            ):
                pass
            case _:
                raise TypeError(
                    f"metric {name}: expected a Metric of one number, got {metric!r:.200}; "
                    "Metric.mean, Metric.sum or Metric.max of a tensor makes one"
                )
        if name in _OWN:
            raise TypeError(f"metric {name}: a step reports a number of its own by this name")
    return value, metrics


Loss = Callable[[LossTokens], tuple[torch.Tensor, Metrics]]
"""A loss with its settings."""


def decoupled_ppo(
    tokens: LossTokens,
    *,
    clip_low: float,
    clip_high: float,
    clip_center: str = "proximal",
    use_behavior_weight: bool = True,
    behavior_weight_cap: float = float("inf"),
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean PPO loss whose trust region is centred on a proximal policy.

    L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / num_loss_tokens,
    r = pi_theta / pi_prox, w = pi_prox / pi_behav (no gradient).
    Source: AReaL, arXiv:2505.24298, eq. 5.

    Args:
        tokens: with fields `behavior_logprobs`, `proximal_logprobs` and `advantages`.
        clip_low, clip_high: how far r may fall below and rise above 1 before the gain is cut.
        clip_center: `proximal`, or `behavior`: pi_prox is pi_behav then, and w is 1.
        use_behavior_weight: False: w is 1.
        behavior_weight_cap: tokens with w above it leave the numerator, not the denominator.
    Returns: scalar loss, and metrics of these tokens: the means `clip_fraction` (the clipped branch
        is the smaller one), `capped_fraction`, `ratio`, `abs_advantage`, `behavior_weight` (as
        used: 0 over the cap), and of r - 1 - log r, a divergence estimate, `proximal_kl`, and the
        same of w, `behavior_kl` (0 for capped tokens); and the largest ratio, `ratio_max`.
    """
    dtype = tokens.logprobs.dtype
    proximal = tokens.fields[f"{clip_center}_logprobs"].detach().to(dtype)
    behavior = proximal
    if use_behavior_weight:
        behavior = tokens.fields["behavior_logprobs"].detach().to(dtype)
    advantage = tokens.fields["advantages"].detach().to(dtype)

    log_ratio = tokens.logprobs - proximal
    ratio = log_ratio.detach().exp()
    bounded = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = bounded * advantage < ratio * advantage
    log_weight = proximal - behavior
    weight = log_weight.exp()
    is_capped = ~(weight <= behavior_weight_cap)  # so that NaN, too, is over the cap
    weight = weight.masked_fill(is_capped, 0.0)
    log_weight = log_weight.masked_fill(is_capped, 0.0)
    # An exponential that may be infinite is left out before it is taken: 0 * inf would be NaN, in
    # the loss or in its gradient.
    is_without_gain = is_capped | (advantage == 0)
    is_constant = is_without_gain | is_clipped
    moving = (log_weight + log_ratio).masked_fill(is_constant, 0.0).exp()
    constant = (weight * bounded).masked_fill(is_without_gain, 0.0)
    gains = torch.where(is_constant, constant, moving) * advantage
    loss = -gains.sum() / tokens.num_loss_tokens
    with torch.no_grad():
        return loss, {
            "clip_fraction": Metric.mean(is_clipped),
            "capped_fraction": Metric.mean(is_capped),
            "ratio": Metric.mean(ratio),
            "ratio_max": Metric.max(ratio),
            "behavior_weight": Metric.mean(weight),
            "abs_advantage": Metric.mean(advantage.abs()),
            "proximal_kl": Metric.mean(ratio - 1 - log_ratio),
            "behavior_kl": Metric.mean((weight - 1 - log_weight).masked_fill(is_capped, 0.0)),
        }


def cross_entropy(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Token-mean cross entropy of given completions: -sum_t logprobs_t / num_loss_tokens.

    Returns: scalar loss, and the mean `logprob` of these tokens.
    """
    loss = -tokens.logprobs.sum() / tokens.num_loss_tokens
    return loss, {"logprob": Metric.mean(tokens.logprobs)}
