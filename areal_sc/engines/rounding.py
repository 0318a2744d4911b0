"""How far rounding alone moves what a model computes: the unit in which two results are compared.

Two ways of computing the same thing give results that differ by rounding. By how much depends on
the model, the tokens and the type of the numbers, over six orders of magnitude, so no number of
nats separates rounding from a wrong mask. It is measured here, with the model that is tried: a pass
computes each row several times, and moves what each module returns at random, by as much as one
rounding of it does. The spread of the results is the noise.

    noise      the spread of each value: of a log-probability, or of one number of a hidden state
    distance   how far two results are apart, in units of the noise
    limit      the largest distance that rounding explains
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from areal_sc.engines.training.streamed_layers import decoder_layers
from areal_sc.errors import ModelError

NUM_DRAWS: Final = 8
"""Copies of each row. The spread of so many is known to a quarter."""

LIMITS: Final = {torch.float32: 30.0, torch.bfloat16: 4.0, torch.float16: 4.0}
"""The largest distance of two ways that compute the same, by the type that the second one computes
in. In float32 each term of a sum is rounded, which gave distances of up to 6; in 16 bits sums are
kept in float32 and rounded once, which gave 1.2."""

WRONG: Final = 100.0
"""A distance in float32 that is a mistake for sure. Mistakes gave 480 and more."""

_LEAST_SHARE: Final = 0.1
"""A token's many numbers move at least by this share of the noise of that token's numbers together.
The draws of a single number say less: it moves at least as the others do."""

_MOST_NATS: Final = 0.05
"""The largest noise of a log-probability in float32. Pretrained models had 4e-4 at their worst."""


@dataclass(frozen=True, eq=False)
class Expected:
    """What a model computes in float32, and what rounding does to it.

    Attributes:
        values: [T], a number each token, or [T, H], several that count together.
        noise: of the same shape: the standard deviation of each, >= 0.
        dtype: what is compared with it is computed in this type.
    """

    values: torch.Tensor
    noise: torch.Tensor
    dtype: torch.dtype = torch.float32

    @property
    def limit(self) -> float:
        """The largest distance that rounding explains."""
        return LIMITS[self.dtype]

    def part(self, tokens: range) -> Expected:
        """The same for these tokens alone, which follow each other."""
        chosen = slice(tokens.start, tokens.stop)
        return Expected(self.values[chosen], self.noise[chosen], self.dtype)

    def distance(self, found: torch.Tensor) -> float:
        """How far `found` is from the values, in units of the noise.

        Of a number each it is the largest one over the tokens. Of several, the root mean square
        over a token's numbers, and of these the upper quartile: rounding may send some tokens to
        other experts. Infinity where a number is not finite; 0 where there is no token.
        """
        if not len(self.values):
            return 0.0
        if self.values.dim() == 1:
            least = self.noise.square().mean().sqrt()
        else:
            least = _LEAST_SHARE * self.noise.square().mean(-1, keepdim=True).sqrt()
        # of each number by itself: a few channels of a pretrained model are very large
        rounded = torch.finfo(self.dtype).eps * self.values.abs()
        unit = self.noise.maximum(least).maximum(rounded)
        apart = (found - self.values) / unit.clamp(min=torch.finfo(torch.float32).tiny)
        if not apart.isfinite().all():
            return math.inf
        of_tokens = apart.reshape(len(apart), -1).square().mean(1).sqrt()
        return float(of_tokens.quantile(1.0 if self.values.dim() == 1 else 0.75))


@torch.no_grad()
def measure_noise(
    causal_lm: nn.Module, dtype: torch.dtype, compute: Callable[[int], torch.Tensor]
) -> torch.Tensor:
    """What rounding to `dtype` does to what a model computes.

    Args:
        causal_lm: in float32.
        compute: given K, calls the model with K copies of each row, and returns [K, ...], the
            result of each copy.
    Returns: [...] float32, the standard deviation of each value; NaN where values are not finite.
    """
    with _rounding(causal_lm, torch.finfo(dtype).eps / 2):
        return compute(NUM_DRAWS).float().std(0)


def require_determined(causal_lm: nn.Module, noise: torch.Tensor) -> None:
    """Checks that rounding does not hide everything: what a model computes is one thing.

    Args: noise: of log-probabilities in float32, nats.
    Raises: ModelError: it is too large: the model draws random numbers, or multiplies differences.
    """
    worst = float(noise.max())
    if not worst <= _MOST_NATS:
        raise ModelError(
            f"{type(causal_lm).__name__}: rounding in float32 moves its log-probabilities by "
            f"{worst:.2g} nats, expected at most {_MOST_NATS:g}: a mistake could not be told from "
            "rounding; does it draw random numbers in its forward pass?"
        )


@contextmanager
def _rounding(causal_lm: nn.Module, unit: float) -> Iterator[None]:
    """Within it what modules return is moved at random, as rounding moves it.

    Args: unit: the largest relative size of one rounding, here its standard deviation.
    """
    generators = dict[torch.device, torch.Generator]()
    widest = 3**0.5 * unit  # of uniform draws whose standard deviation is the unit

    def moved(values: Any, *, is_sum: bool) -> Any:
        if not isinstance(values, torch.Tensor) or not values.is_floating_point():
            return values
        device = values.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(0)
        size = values.abs()
        if is_sum:  # of terms that cancel each other: a small sum is rounded as a typical one
            typical = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
            torch.maximum(size, typical / values.shape[-1] ** 0.5, out=size)
        draws = torch.empty_like(values).uniform_(-widest, widest, generator=generators[device])
        return draws.mul_(size).add_(values)  # logits of all draws are large: no copy more

    def move(module: nn.Module, _inputs: Any, outputs: Any) -> Any:
        is_sum = isinstance(module, nn.Linear)
        if isinstance(outputs, tuple):
            return tuple(moved(values, is_sum=is_sum) for values in outputs)
        return moved(outputs, is_sum=is_sum)

    layers = set(decoder_layers(causal_lm))
    with ExitStack() as hooks:
        for module in causal_lm.modules():
            if module in layers or next(module.children(), None) is None:
                hooks.enter_context(module.register_forward_hook(move))
        yield
