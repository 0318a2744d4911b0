"""Tensor parallelism of a Hugging Face model, by the model's own plan.

A rank of a tensor group has a cut of each linear layer that the plan names, and of the vocabulary:

    colwise      some of the outputs: whole attention heads, or a range
    rowwise      the same ones as inputs; the ranks' outputs are added up
    replicated_with_grad_allreduce    all of a parameter, which each rank uses for its heads alone
    colwise_gather_output, rowwise_split_input
                 the same cuts, but between the two every rank computes all features

Between these regions every rank has the same hidden states. In a region in which a rank has its
own features, all parameters must be in the plan: one that is not would get a part of its gradient
only. What the plan asks for beyond this is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.engines.fsdp.cuts import Cut
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ModelError

COLWISE, ROWWISE = "colwise", "rowwise"
PARTIAL_COPIES = "replicated_with_grad_allreduce"
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
_STYLES = (COLWISE, ROWWISE, GATHERED, SPLIT, PARTIAL_COPIES)


def plan_cuts(causal_lm: Any, num_ranks: int, *, cuts_vocabulary: bool) -> dict[str, Cut]:
    """What every parameter becomes, by all of its names.

    Args:
        num_ranks: of a tensor group.
        cuts_vocabulary: logits are the output layer's product with hidden states, so that each
            rank can have those of some tokens.
    Raises: ModelError: the model has no plan, or one that cannot be followed exactly.
        ConfigError: the ranks do not divide its heads.
    """
    shapes = {name: p.shape for name, p in causal_lm.named_parameters(remove_duplicate=False)}
    cuts = {name: Cut.copies(shape, num_ranks) for name, shape in shapes.items()}
    if num_ranks == 1:
        return cuts
    planned = dict(_planned_modules(causal_lm))
    if not planned:
        raise _refusal(causal_lm, "has no plan for tensor parallelism")
    modules = dict(causal_lm.named_modules())
    for name, style in planned.items():
        cuts |= _cuts_of_module(causal_lm, name, modules[name], style, num_ranks)
    _check_regions(causal_lm, planned)
    if cuts_vocabulary:
        for module in _vocabulary_modules(causal_lm):
            (name,) = (n for n, found in modules.items() if found is module)
            sizes = _even_sizes(len(module.weight), num_ranks)
            cuts |= _cut_along(name, module, 0, sizes)
    return cuts


def cut_model(causal_lm: Any, cuts: Mapping[str, Cut], group: ProcessGroup) -> None:
    """Gives the model this rank's part of every parameter, without values, and its collectives."""
    if group.size == 1:
        return
    modules = dict(causal_lm.named_modules())
    replaced: dict[int, nn.Parameter] = {}
    for name, parameter in list(causal_lm.named_parameters(remove_duplicate=False)):
        sizes = cuts[name].boxes[group.rank].sizes
        if sizes != tuple(parameter.shape) and id(parameter) not in replaced:
            values = torch.empty(sizes, dtype=parameter.dtype, device=parameter.device)
            replaced[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
    for name, parameter in list(causal_lm.named_parameters(remove_duplicate=False)):
        if id(parameter) in replaced:
            module, _, own_name = name.rpartition(".")
            setattr(modules[module], own_name, replaced[id(parameter)])
    entries: dict[str, _Entry] = {}
    for name, style in _planned_modules(causal_lm):
        module, region = modules[name], name.rpartition(".")[0]
        if style in (COLWISE, GATHERED):
            if region not in entries:
                entries[region] = _Entry(group)
                modules[region].register_forward_hook(entries[region].leave)
            module.register_forward_pre_hook(entries[region])
        if style == GATHERED:
            spread = _Spread([box.sizes[0] for box in cuts[f"{name}.weight"].boxes], group)
            module.register_forward_hook(_Gatherer(spread))
        elif style == SPLIT:
            spread = _Spread([box.sizes[1] for box in cuts[f"{name}.weight"].boxes], group)
            module.forward = _RowwiseForward(module, spread, group)
        elif style == ROWWISE:
            module.forward = _RowwiseForward(module, None, group)
    embeddings = causal_lm.get_input_embeddings()
    cut = cuts[_name_of(causal_lm, embeddings.weight)]
    if cut.boxes[0].sizes != tuple(cut.shape):
        _split_embeddings(embeddings, cut.boxes[group.rank], group)


def vocabulary_start(causal_lm: Any, cuts: Mapping[str, Cut], rank: int) -> int | None:
    """First token of a rank's part of the output layer; None: it has the whole layer."""
    cut = cuts[_name_of(causal_lm, causal_lm.get_output_embeddings().weight)]
    box = cut.boxes[rank]
    return box.starts[0] if box.sizes != tuple(cut.shape) else None


def _planned_modules(causal_lm: Any) -> Iterator[tuple[str, str]]:
    """(name, style) of each module in the plan, without embeddings and output layer."""
    plan = causal_lm.tp_plan or {}
    own = {id(module) for module in _vocabulary_modules(causal_lm)}
    for name, module in causal_lm.named_modules():
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None and id(module) not in own:
            yield name, style


def _vocabulary_modules(causal_lm: Any) -> list[Any]:
    head = causal_lm.get_output_embeddings()
    return [causal_lm.get_input_embeddings(), *([] if head is None else [head])]


def _cuts_of_module(
    causal_lm: Any, name: str, module: Any, style: str, num_ranks: int
) -> dict[str, Cut]:
    if style not in _STYLES:
        raise _refusal(causal_lm, f"plans {name} as {style!r}, of which this engine knows nothing")
    if style == PARTIAL_COPIES:
        return {
            f"{name}.{own}": Cut.copies(p.shape, num_ranks, has_partial_gradients=True)
            for own, p in module.named_parameters()
        }
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise _refusal(causal_lm, f"plans {name} as {style!r}, but that is no plain linear layer")
    dim = 0 if style in (COLWISE, GATHERED) else 1
    size = module.weight.shape[dim]
    if style in (GATHERED, SPLIT):
        return _cut_along(name, module, dim, _even_sizes(size, num_ranks))
    region = causal_lm.get_submodule(name.rpartition(".")[0])
    ranges = _ranges(causal_lm, name, size, getattr(region, "head_dim", None), num_ranks)
    return _cut_along(name, module, dim, ranges)


def _cut_along(name: str, module: Any, dim: int, ranges: list[tuple[int, int]]) -> dict[str, Cut]:
    """Cuts of a linear layer or embedding.

    Args:
        ranges: (start, size) of each rank; ranks that have the same one are copies, whose
            activations differ.
    """
    is_copied = len(set(ranges)) < len(ranges)
    cuts = {}
    for own, parameter in module.named_parameters():
        if parameter.dim() <= dim:  # the bias of a rowwise layer is added once
            continue
        box = Box.whole(parameter.shape)
        boxes = tuple(box.narrowed(dim, *range_) for range_ in ranges)
        cuts[f"{name}.{own}"] = Cut(parameter.shape, boxes, has_partial_gradients=is_copied)
    return cuts


def _ranges(
    causal_lm: Any, name: str, size: int, head_dim: int | None, num_ranks: int
) -> list[tuple[int, int]]:
    """(start, size) of each rank's features of a layer: whole heads in attention.

    Raises: ModelError, ConfigError: heads cannot be spread over the ranks.
    """
    if head_dim is None:
        if "attn" in name or "attention" in name:
            raise _refusal(causal_lm, f"does not tell the size of the heads of {name}")
        if size < num_ranks:
            raise _refusal(causal_lm, f"has {size} features in {name}, fewer than ranks")
        return _even_sizes(size, num_ranks)
    config = causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    num_heads = size // head_dim
    if size % head_dim or num_heads not in (heads, kv_heads):
        raise _refusal(
            causal_lm, f"has {size} features in {name}, which are not heads of {head_dim}"
        )
    ParallelConfig(tensor=num_ranks).check_heads(heads, kv_heads)
    if num_heads % num_ranks == 0:
        return _even_sizes(size, num_ranks)
    ranks_per_head = num_ranks // num_heads
    return [(rank // ranks_per_head * head_dim, head_dim) for rank in range(num_ranks)]


def _even_sizes(size: int, num_ranks: int) -> list[tuple[int, int]]:
    """(start, size) of each rank; the sizes differ by one at most."""
    bounds = [rank * size // num_ranks for rank in range(num_ranks + 1)]
    return [(bounds[r], bounds[r + 1] - bounds[r]) for r in range(num_ranks)]


def _check_regions(causal_lm: Any, planned: Mapping[str, str]) -> None:
    """Raises: ModelError: a gradient would be a part of what it is, or several times it."""
    styles: dict[str, set[str]] = {}
    for name, style in planned.items():
        styles.setdefault(name.rpartition(".")[0], set()).add(style)
    for region, found in styles.items():
        has_own_features = bool(found & {COLWISE, ROWWISE})
        if found & ({GATHERED, SPLIT} if has_own_features else {PARTIAL_COPIES}):
            raise _refusal(
                causal_lm, f"plans {region} as {', '.join(sorted(found))}, which do not go together"
            )
        for own, _ in causal_lm.get_submodule(region).named_parameters():
            if has_own_features and f"{region}.{own}".rpartition(".")[0] not in planned:
                raise _refusal(
                    causal_lm, f"has {region}.{own}, which its plan does not say how to treat"
                )


def _refusal(causal_lm: Any, why: str) -> ModelError:
    return ModelError(
        f"{type(causal_lm).__name__} {why}: it cannot be trained with tensor parallelism; set "
        "actor.parallel.tensor=1, and more actor.parallel.data"
    )


def _name_of(causal_lm: Any, parameter: Any) -> str:
    named = causal_lm.named_parameters(remove_duplicate=False)
    return next(str(name) for name, found in named if found is parameter)


class _Entry:
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


class _Spread:
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


class _Gatherer:
    """The hook of a layer whose outputs all ranks get."""

    def __init__(self, spread: _Spread) -> None:
        self._spread = spread

    def __call__(self, _module: Any, _inputs: Any, outputs: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = _Gather.apply(outputs, self._spread)  # type: ignore[no-untyped-call]
        return gathered


class _RowwiseForward:
    """The forward of a rowwise layer.

    Args:
        spread: of the inputs, of which every rank has all; None: each has its own.
    """

    def __init__(self, linear: nn.Linear, spread: _Spread | None, group: ProcessGroup) -> None:
        self._linear = linear
        self._spread = spread
        self._group = group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self._spread is not None:
            inputs = _Split.apply(inputs, self._spread)  # type: ignore[no-untyped-call]
        partial = F.linear(inputs, self._linear.weight)
        summed: torch.Tensor = _Leave.apply(partial, self._group)  # type: ignore[no-untyped-call]
        return summed if self._linear.bias is None else summed + self._linear.bias


def _split_embeddings(embeddings: Any, box: Box, group: ProcessGroup) -> None:
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
    def forward(ctx: Any, hidden: torch.Tensor, entry: _Entry) -> torch.Tensor:
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
    def forward(ctx: Any, own: torch.Tensor, spread: _Spread) -> torch.Tensor:
        ctx.spread = spread
        return spread.gather(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.spread.own(grad), None


class _Split(torch.autograd.Function):
    """One's own of all features; the gradient of all."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, spread: _Spread) -> torch.Tensor:
        ctx.spread = spread
        return spread.own(values)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.spread.gather(grad), None
