"""Losses over packed tokens. Sums over micro-batches and ranks give the loss of the minibatch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch


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
        """That of both micro-batches together."""
        if self.combine == "max":
            return replace(self, value=torch.maximum(self.value, other.value))
        return replace(self, value=self.value + other.value, weight=self.weight + other.weight)


Metrics = dict[str, Metric]
"""By the names under which a step reports them."""


def decoupled_ppo_loss(
    logprobs: torch.Tensor,
    proximal_logprobs: torch.Tensor,
    behavior_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    loss_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    behavior_weight_cap: float | None,
    num_loss_tokens: float,
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean PPO loss whose trust region is centred on a proximal policy.

    L = -sum_t w_t min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) / num_loss_tokens,
    r = pi_theta / pi_prox, w = pi_prox / pi_behav (no gradient).
    Source: AReaL, arXiv:2505.24298, eq. 5.

    Args:
        logprobs: [T] nats, requires grad.
        proximal_logprobs: [T] nats, of the policy at the start of the training step.
        behavior_logprobs: [T] nats, of the policy that sampled the token.
        advantages: [T].
        loss_mask: [T] bool, True on trained tokens. The others may hold anything, NaN included.
        clip_low, clip_high: how far r may fall below and rise above 1 before the gain is cut.
        behavior_weight_cap: tokens with w above it leave the numerator, not the denominator;
            None for no cap.
        num_loss_tokens: trained tokens of the minibatch over all ranks and micro-batches, > 0.
    Returns: scalar loss, and metrics of this call's trained tokens: their number,
        `num_effective_tokens`; the means `clip_fraction` (the clipped branch is the smaller one),
        `capped_fraction`, `ratio`, `abs_advantage`, `behavior_weight` (as used: 0 over the cap),
        and of r - 1 - log r, a divergence estimate, `proximal_kl`, and the same of w,
        `behavior_kl` (0 for capped tokens); and the largest ratio, `ratio_max`.
    Raises: ValueError: shapes differ, or num_loss_tokens <= 0.
    """
    _check_shapes(
        logprobs=logprobs,
        proximal_logprobs=proximal_logprobs,
        behavior_logprobs=behavior_logprobs,
        advantages=advantages,
        loss_mask=loss_mask,
    )
    _check_denominator(num_loss_tokens)
    # Selecting, rather than multiplying by the mask, keeps NaN and inf out of both directions.
    mask = loss_mask.bool()
    trained = logprobs[mask]
    proximal = proximal_logprobs[mask].detach().to(trained.dtype)
    behavior = behavior_logprobs[mask].detach().to(trained.dtype)
    advantage = advantages[mask].detach().to(trained.dtype)

    log_ratio = trained - proximal
    ratio = log_ratio.exp()
    log_weight = proximal - behavior
    weight = log_weight.exp()
    unclipped = ratio * advantage
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high) * advantage
    is_capped = torch.zeros_like(weight, dtype=torch.bool)
    if behavior_weight_cap is not None:
        is_capped = ~(weight <= behavior_weight_cap)  # so that NaN, too, is over the cap
        # before it meets a gradient: 0 * inf would be NaN
        weight = weight.masked_fill(is_capped, 0.0)
        log_weight = log_weight.masked_fill(is_capped, 0.0)
    loss = -(weight * torch.minimum(unclipped, clipped)).sum() / num_loss_tokens
    with torch.no_grad():
        return loss, {
            "num_effective_tokens": Metric.sum(mask),
            "clip_fraction": Metric.mean(clipped < unclipped),
            "capped_fraction": Metric.mean(is_capped),
            "ratio": Metric.mean(ratio),
            "ratio_max": Metric.max(ratio),
            "behavior_weight": Metric.mean(weight),
            "abs_advantage": Metric.mean(advantage.abs()),
            "proximal_kl": Metric.mean(ratio - 1 - log_ratio),
            "behavior_kl": Metric.mean((weight - 1 - log_weight).masked_fill(is_capped, 0.0)),
        }


def sft_loss(
    logprobs: torch.Tensor, loss_mask: torch.Tensor, *, num_loss_tokens: float
) -> tuple[torch.Tensor, Metrics]:
    """Token-mean cross entropy: -sum_t logprobs_t / num_loss_tokens over the masked-in tokens.

    Args:
        logprobs: [T] nats, requires grad.
        loss_mask: [T] bool, True on trained tokens. The others may hold anything.
        num_loss_tokens: trained tokens of the batch over all ranks and micro-batches, > 0.
    Returns: scalar loss; the number `num_effective_tokens` of tokens, and their mean `logprob`.
    Raises: ValueError: shapes differ, or num_loss_tokens <= 0.
    """
    _check_shapes(logprobs=logprobs, loss_mask=loss_mask)
    _check_denominator(num_loss_tokens)
    trained = logprobs[loss_mask.bool()]
    metrics = {"num_effective_tokens": Metric.sum(loss_mask), "logprob": Metric.mean(trained)}
    return -trained.sum() / num_loss_tokens, metrics


def _check_shapes(**tensors: torch.Tensor) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"expected one shape [T] for all, got {listed}")


def _check_denominator(num_loss_tokens: float) -> None:
    if not num_loss_tokens > 0:
        raise ValueError(f"num_loss_tokens must be > 0, got {num_loss_tokens}")
