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
        *("num_effective_tokens", "num_skipped_updates", "num_micro_batches", "loss_scale"),
        *("num_row_tokens", "num_computed_tokens", "shared_token_share"),
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


def cross_entropy(tokens: LossTokens) -> tuple[torch.Tensor, Metrics]:
    """Token-mean cross entropy of given completions: -sum_t logprobs_t / num_loss_tokens.

    Returns: scalar loss, and the mean `logprob` of these tokens.
    """
    loss = -tokens.logprobs.sum() / tokens.num_loss_tokens
    return loss, {"logprob": Metric.mean(tokens.logprobs)}
