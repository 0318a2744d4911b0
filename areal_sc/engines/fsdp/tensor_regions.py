"""Where tensor parallelism changes a layer: what enters and leaves it, and the collectives there.

Outside of these regions all ranks of a tensor group have the same hidden states and gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
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
            entered: torch.Tensor = _Enter.apply(hidden, self)  # type: ignore[no-untyped-call]
            self._entered = hidden, entered
        return (self._entered[1],)

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

    def own(self, values: torch.Tensor) -> torch.Tensor:
        """[..., n] of this rank, of all [..., N]."""
        return torch.split(values, self._sizes, -1)[self._group.rank]

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """[..., N] of all ranks."""
        padded = F.pad(own, (0, max(self._sizes) - own.shape[-1])).contiguous()
        parts = [torch.empty_like(padded) for _ in self._sizes]
        dist.all_gather(parts, padded, group=self._group.handle)
        return torch.cat(
            [part[..., :size] for part, size in zip(parts, self._sizes, strict=True)], -1
        )


class Gatherer:
    """The hook of a layer whose outputs all ranks get."""

    def __init__(self, spread: Spread) -> None:
        self._spread = spread

    def __call__(self, _module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = _Gather.apply(outputs, self._spread)  # type: ignore[no-untyped-call]
        return gathered


class RowwiseForward:
    """The forward of a rowwise layer.

    Args:
        spread: of the inputs, of which every rank has all; None: each has its own.
    """

    def __init__(self, linear: nn.Linear, spread: Spread | None, group: ProcessGroup) -> None:
        self._linear = linear
        self._spread = spread
        self._group = group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._spread is not None:
            inputs = _Split.apply(inputs, self._spread)  # type: ignore[no-untyped-call]
        partial = F.linear(inputs, self._linear.weight)
        if isinstance(self._linear, LoraLinear) and self._linear.is_adapted:
            partial = partial + self._linear.added(inputs)
        summed: torch.Tensor = _Leave.apply(partial, self._group)  # type: ignore[no-untyped-call]
        return summed if self._linear.bias is None else summed + self._linear.bias


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
        hidden, weights = (_Enter.apply(it, Entry(self._group)) for it in (hidden, weights))  # type: ignore[no-untyped-call]
        own = self._forward(
            hidden, local.masked_fill(is_foreign, self._count), weights.masked_fill(is_foreign, 0)
        )
        summed: torch.Tensor = _Leave.apply(own, self._group)  # type: ignore[no-untyped-call]
        return summed


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
        own = outputs.masked_fill(foreign.pop()[..., None], 0)
        summed: torch.Tensor = _Leave.apply(own, group)  # type: ignore[no-untyped-call]
        return summed

    embeddings.register_forward_pre_hook(localize)
    embeddings.register_forward_hook(add_up)


class _Enter(torch.autograd.Function):
    """Into a region: nothing forward; the ranks' gradients are added up."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, entry: Entry) -> torch.Tensor:
        ctx.entry = entry
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.entry.leave()
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.entry.group.handle)
        return grad, None


class _Leave(torch.autograd.Function):
    """Out of a region: the ranks' values are added up; the gradient is each rank's."""

    @staticmethod
    def forward(ctx: Any, partial: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        summed = partial.contiguous().clone()
        dist.all_reduce(summed, group=group.handle)
        return summed

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _Gather(torch.autograd.Function):
    """All features, which every rank then computes with; the gradient of one's own."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, spread: Spread) -> torch.Tensor:
        ctx.spread = spread
        return spread.gather(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.spread.own(grad), None


class _Split(torch.autograd.Function):
    """One's own of all features; the gradient of all."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, spread: Spread) -> torch.Tensor:
        ctx.spread = spread
        return spread.own(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.spread.gather(grad), None
