"""Where tensor parallelism changes a layer: what enters and leaves it, and the collectives there.

Outside of these regions all ranks of a tensor group have the same hidden states and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from areal_sc.engines.training.adapters.lora import LoraLinear
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup


class Entry:
    """The pre-hook of a region's colwise layers: the gradients that they give back are added up.

    Layers that share an input share one sum.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._entered: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (hidden,) = inputs
        if self._entered is None or self._entered[0] is not hidden:
            self._entered = hidden, self.enter(hidden)
        return (self._entered[1],)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same hidden states, from inside the region."""

        def leave_and_add_up(grad: torch.Tensor) -> torch.Tensor:
            self.leave()
            return _sum(grad, self.group)

        return _pass(hidden, hidden.view_as, leave_and_add_up)

    def leave(self, *_: Any) -> None:
        """The hook at the region's end, and its backward: nothing of it is kept.

        A forward that is computed again in backward may stop before its end.
        """
        self._entered = None


class Spread:
    """Features that are spread over the ranks, along the last dimension.

    Args:
        sizes: number of each rank's.
    """

    def __init__(self, sizes: Sequence[int], group: ProcessGroup) -> None:
        self._sizes = list(sizes)
        self._group = group

    def split(self, values: torch.Tensor) -> torch.Tensor:
        """[..., n] of this rank, of all [..., N]; the gradient is of all."""
        return _pass(values, self._own, self._whole)

    def gather(self, _module: Any, _inputs: Any, own: torch.Tensor) -> torch.Tensor:
        """[..., N] of all ranks' outputs of a layer, as its hook; the gradient is of one's own."""
        return _pass(own, self._whole, self._own)

    def _own(self, values: torch.Tensor) -> torch.Tensor:
        return torch.split(values, self._sizes, -1)[self._group.rank]

    def _whole(self, own: torch.Tensor) -> torch.Tensor:
        padded = F.pad(own, (0, max(self._sizes) - own.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(parts, padded, group=self._group.handle)
        return torch.cat(
            [part[..., :size] for part, size in zip(parts, self._sizes, strict=True)], -1
        )


def rowwise(
    linear: nn.Linear, spread: Spread | None, group: ProcessGroup, inputs: torch.Tensor
) -> torch.Tensor:
    """The forward of a rowwise layer.

    Args:
        spread: of the inputs, of which every rank has all; None: each has its own.
    """
    if spread is not None:
        inputs = spread.split(inputs)
    partial = F.linear(inputs, linear.weight)
    if isinstance(linear, LoraLinear) and linear.is_adapted:
        partial = partial + linear.added(inputs)
    summed = _leave(partial, group)
    return summed if linear.bias is None else summed + linear.bias


def can_have_some_experts(module: Any) -> bool:
    """Whether a module is a layer's experts, computed by a function that skips those of others.

    transformers' functions do that, and give all of its parameters a gradient also where no token
    goes to any of its experts. A loop over the experts that tokens go to would not.
    """
    return hasattr(module, "_is_expert_parallel") and (
        module.config._experts_implementation == "grouped_mm"
    )


class OwnExperts:
    """The forward of a layer's experts, of which this rank has some.

    Args:
        first, count: of this rank's.
    """

    def __init__(self, experts: Any, first: int, count: int, group: ProcessGroup) -> None:
        self._forward = experts.forward
        self._first = first
        self._group = group
        # As transformers' own expert parallelism tells its functions: the index after the last
        # expert means one on another rank.
        experts.num_experts = count
        experts._is_expert_parallel = True
        self._count = count

    def __call__(
        self, hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """[T, H] of [T, H] and, for each token, the [T, K] experts and their weights."""
        local = indices - self._first
        is_foreign = (local < 0) | (local >= self._count)
        hidden, weights = (Entry(self._group).enter(it) for it in (hidden, weights))
        own = self._forward(
            hidden, local.masked_fill(is_foreign, self._count), weights.masked_fill(is_foreign, 0)
        )
        return _leave(own, self._group)


def split_embeddings(embeddings: Any, box: Box, group: ProcessGroup) -> None:
    """Each rank looks up the tokens that it has; the others' rows are 0 until they are added up."""
    start, size = box.starts[0], box.sizes[0]
    if embeddings.padding_idx is not None:
        local = embeddings.padding_idx - start
        embeddings.padding_idx = local if 0 <= local < size else None
    foreign: list[torch.Tensor] = []

    def localize(_module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        (input_ids,) = inputs
        local_ids = input_ids - start
        foreign.append((local_ids < 0) | (local_ids >= size))
        return (local_ids.masked_fill(foreign[-1], 0),)

    def add_up(_module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        return _leave(outputs.masked_fill(foreign.pop()[..., None], 0), group)

    embeddings.register_forward_pre_hook(localize)
    embeddings.register_forward_hook(add_up)


def _leave(partial: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    """Out of a region: the ranks' values are added up; the gradient is each rank's."""
    return _pass(partial, lambda values: _sum(values, group), lambda grad: grad)


def _sum(values: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    summed = values.contiguous().clone()
    dist.all_reduce(summed, group=group.handle)
    return summed


_Way = Callable[[torch.Tensor], torch.Tensor]


def _pass(values: torch.Tensor, forth: _Way, back: _Way) -> torch.Tensor:
    """`forth` of the values, whose gradient is `back` of the result's."""
    passed: torch.Tensor = _Border.apply(values, forth, back)  # type: ignore[no-untyped-call]
    return passed


class _Border(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, forth: _Way, back: _Way) -> torch.Tensor:
        ctx.back = back
        return forth(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(grad), None, None
