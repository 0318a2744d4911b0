"""What is computed of logits [N, V] alone, in as few passes over them as the device allows.

The logits of a thousand tokens are half a gigabyte. On a GPU torch compiles each of the two
functions below into one or two kernels, where one operation after the other would write and read
that memory six times.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

logger = logging.getLogger(__name__)

FUSED_DEVICES = frozenset({"cuda"})
"""Kinds of device on which a pass over the logits costs more than the arithmetic in it."""


@dataclass
class VocabularySums:
    """Sums of each token over logits; [N] each, relative to the peak.

    Attributes:
        peak: the highest logit.
        total: sum of exp(logit - peak).
        weighed: sum of (logit - peak) exp(logit - peak).
    """

    peak: torch.Tensor
    total: torch.Tensor
    weighed: torch.Tensor

    def part(self, part: slice) -> VocabularySums:
        """The sums of some tokens, in the same memory."""
        return VocabularySums(self.peak[part], self.total[part], self.weighed[part])

    def move(self, peak: torch.Tensor) -> torch.Tensor:
        """Makes the sums relative to a higher peak, in place; returns exp(old peak - new peak)."""
        fall = self.peak - peak
        shrunk = fall.exp()
        self.weighed.addcmul_(self.total, fall).mul_(shrunk)
        self.total.mul_(shrunk)
        self.peak.copy_(peak)
        return shrunk

    def add(self, other: VocabularySums) -> None:
        """Adds those over further logits; both are changed."""
        peak = torch.maximum(self.peak, other.peak)
        self.move(peak)
        other.move(peak)
        self.total += other.total
        self.weighed += other.weighed

    @property
    def normalizer(self) -> torch.Tensor:
        """Log of the sum of exp(logit)."""
        return self.peak + self.total.log()

    @property
    def entropy(self) -> torch.Tensor:
        """Entropy of the distribution, nats: log sum exp(gap) - E[gap]."""
        return self.total.log() - self.weighed / self.total


def is_fused(logits: torch.Tensor) -> bool:
    """Whether logits on this device go through the compiled functions."""
    return logits.device.type in FUSED_DEVICES


def sums_over(
    logits: torch.Tensor, temperatures: torch.Tensor | None
) -> tuple[VocabularySums, torch.Tensor]:
    """The sums over logits [N, V] that are divided by temperatures [N] first.

    Returns: the sums, and what a backward pass of the same logits can begin with, [N, V]: on the
        CPU exp(logit - peak), for which the logits are overwritten; where it is fused, the logits.
    """
    if is_fused(logits):
        return VocabularySums(*fused(_sums, logits, temperatures)), logits
    if temperatures is not None:
        logits = logits.div_(temperatures[:, None])
    # one pass of exponentials serves the normalizer, the entropy and the gradient
    peak = logits.amax(-1)
    # a sum that contains the peak is rounded to the peak's spacing; differences are not
    gaps = logits.sub_(peak[:, None])
    exponentials = gaps.exp()
    # einsum keeps the product of the two from being stored
    weighed = torch.einsum("nv,nv->n", exponentials, gaps)
    return VocabularySums(peak, exponentials.sum(-1), weighed), exponentials


def gradient_of_logits(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    normalizer: torch.Tensor,
    targets: torch.Tensor,
    of_targets: torch.Tensor,
    scale: torch.Tensor,
    entropy: torch.Tensor,
    grad_entropy: torch.Tensor | None,
    dtype: torch.dtype,
    peak: torch.Tensor | None = None,
) -> torch.Tensor:
    """[N, V] gradient by the logits before they are divided; for `fused`.

    d logprob_t / d logit_v = (1[v = target] - p_v) / temperature.

    Args:
        temperatures: [N], or None: 1.
        normalizer: [N] of the divided logits.
        targets: [N] int64, places in V of one target.
        of_targets: [N] gradient of its log-probability where it is among the V, else 0; divided by
            the temperature.
        scale: [N] gradient of the log-probabilities of all targets; divided by the temperature.
        entropy: [N] nats.
        grad_entropy: [N], or None: no gradient comes through the entropy.
        dtype: of the result.
        peak: [N]; in place of the logits there is what `rounded_exponentials` has left with it.
    """
    if peak is None:
        if temperatures is not None:
            logits = logits / temperatures[:, None]
        logprobs = logits - normalizer[:, None]
        probabilities = logprobs.exp()
    else:
        exponentials, of_peak = logits.float(), (peak - normalizer)[:, None]
        probabilities = exponentials * of_peak.exp()
        # of a probability of 0 a finite logarithm, which takes no part
        logprobs = exponentials.clamp(min=torch.finfo(torch.float32).tiny).log() + of_peak
    gradient = -scale[:, None] * probabilities
    if grad_entropy is not None:  # d H / d logit_v = -p_v (log p_v + H)
        if temperatures is not None:
            grad_entropy = grad_entropy / temperatures
        gradient = gradient - grad_entropy[:, None] * probabilities * (logprobs + entropy[:, None])
    is_target = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    return torch.where(is_target, gradient + of_targets[:, None], gradient).to(dtype)


def rounded_exponentials(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    peak: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """[N, V] exp(logit / temperature - peak) in 16 bits; for `fused`.

    It stands for the logits in a backward pass that rounds the gradient to this type anyway: the
    relative error is that of the rounding.
    """
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    return (logits - peak[:, None]).exp().to(dtype)


def _sums(logits: torch.Tensor, temperatures: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    if temperatures is not None:
        logits = logits / temperatures[:, None]
    peak = logits.amax(-1)
    gaps = logits - peak[:, None]
    exponentials = gaps.exp()
    return peak, exponentials.sum(-1), (exponentials * gaps).sum(-1)


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


_cannot_compile = False


def fused(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function of tensors [N, ...] compiled for any N, or plainly where torch cannot."""
    global _cannot_compile
    if _cannot_compile:
        return function(*arguments)
    for values in arguments:
        if isinstance(values, torch.Tensor):
            torch._dynamo.maybe_mark_dynamic(values, 0)
    try:
        return _compiled(function)(*arguments)
    except torch._dynamo.exc.TorchDynamoException as error:
        _cannot_compile = True
        reason = " ".join(str(error).split())[:300]
        logger.warning("the output layer is not compiled, and slower: %s", reason)
        return function(*arguments)
