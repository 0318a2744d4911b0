"""Tensor parallelism of a Hugging Face model, by the model's own plan.

A rank of a tensor group has a cut of each linear layer that the plan names, and of the vocabulary:

    colwise      some of the outputs: whole attention heads, or a range
    rowwise      the same ones as inputs; the ranks' outputs are added up
    replicated_with_grad_allreduce    all of a parameter, which each rank uses for its heads alone
    colwise_gather_output, rowwise_split_input
                 the same cuts, but between the two every rank computes all features
    experts      some of a layer's experts, each whole; the ranks' outputs are added up

Of an adapter A [r, I] is cut along I, or B [O, r] along O, as the layer's own weight is. The other
one is copied, and each rank sees a part of its gradient.

Between these regions every rank has the same hidden states, and so routes tokens alike. In a region
in which a rank has its own features, all parameters must be in the plan: one that is not would get
a part of its gradient only. What the plan asks for beyond this is refused by name. Experts are cut
wherever transformers' own functions compute them, whatever the plan says of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from areal_sc.config.parallel_settings import ParallelConfig
from areal_sc.engines.fsdp.cuts import Cut
from areal_sc.engines.fsdp.tensor_regions import (
    Entry,
    OwnExperts,
    Spread,
    can_have_some_experts,
    rowwise,
    split_embeddings,
)
from areal_sc.engines.training.adapters.lora import LORA_A, LORA_B, LoraLinear, common_name
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.errors import ModelError

COLWISE, ROWWISE = "colwise", "rowwise"
PARTIAL_COPIES = "replicated_with_grad_allreduce"
GATHERED, SPLIT = "colwise_gather_output", "rowwise_split_input"
_STYLES = (COLWISE, ROWWISE, GATHERED, SPLIT, PARTIAL_COPIES)
EXPERTS = "experts"


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
    entries: dict[str, Entry] = {}
    for name, style in _planned_modules(causal_lm):
        module, region = modules[name], name.rpartition(".")[0]
        if style in (COLWISE, GATHERED):
            if region not in entries:
                entries[region] = Entry(group)
                modules[region].register_forward_hook(entries[region].leave)
            module.register_forward_pre_hook(entries[region])
        if style == GATHERED:
            spread = Spread([box.sizes[0] for box in cuts[f"{name}.weight"].boxes], group)
            module.register_forward_hook(spread.gather)
        elif style == SPLIT:
            spread = Spread([box.sizes[1] for box in cuts[f"{name}.weight"].boxes], group)
            module.forward = partial(rowwise, module, spread, group)
        elif style == ROWWISE:
            module.forward = partial(rowwise, module, None, group)
        elif style == EXPERTS:
            own_name, _ = next(module.named_parameters())
            box = cuts[f"{name}.{own_name}"].boxes[group.rank]
            module.forward = OwnExperts(module, box.starts[0], box.sizes[0], group)
    embeddings = causal_lm.get_input_embeddings()
    cut = cuts[_name_of(causal_lm, embeddings.weight)]
    if cut.boxes[0].sizes != tuple(cut.shape):
        split_embeddings(embeddings, cut.boxes[group.rank], group)


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
        if can_have_some_experts(module):
            yield name, EXPERTS
        elif style is not None and id(module) not in own:
            yield name, style


def _vocabulary_modules(causal_lm: Any) -> list[Any]:
    head = causal_lm.get_output_embeddings()
    return [causal_lm.get_input_embeddings(), *([] if head is None else [head])]


def _cuts_of_module(
    causal_lm: Any, name: str, module: Any, style: str, num_ranks: int
) -> dict[str, Cut]:
    if style == EXPERTS:
        return _cuts_of_experts(causal_lm, name, module, num_ranks)
    if style not in _STYLES:
        raise _refusal(causal_lm, f"plans {name} as {style!r}, of which this engine knows nothing")
    if style == PARTIAL_COPIES:
        return {
            f"{name}.{own}": Cut.copies(p.shape, num_ranks, has_partial_gradients=True)
            for own, p in module.named_parameters()
        }
    if not _is_plain_linear(module):
        raise _refusal(causal_lm, f"plans {name} as {style!r}, but that is no plain linear layer")
    dim = 0 if style in (COLWISE, GATHERED) else 1
    size = module.weight.shape[dim]
    if style in (GATHERED, SPLIT):
        ranges = _even_sizes(size, num_ranks)
    else:
        region = causal_lm.get_submodule(name.rpartition(".")[0])
        ranges = _ranges(causal_lm, name, size, getattr(region, "head_dim", None), num_ranks)
    cuts = _cut_along(name, module, dim, ranges)
    if isinstance(module, LoraLinear):
        copied = LORA_A if dim == 0 else LORA_B
        for own, parameter in module.named_parameters():
            if common_name(own) == copied:
                whole = Cut.copies(parameter.shape, num_ranks, has_partial_gradients=True)
                cuts[f"{name}.{own}"] = whole
    return cuts


def _is_plain_linear(module: Any) -> bool:
    return isinstance(module, nn.Linear) and type(module).forward in (
        nn.Linear.forward,
        LoraLinear.forward,
    )


def _cuts_of_experts(causal_lm: Any, name: str, module: Any, num_ranks: int) -> dict[str, Cut]:
    count = module.num_experts
    if count < num_ranks:
        raise _refusal(causal_lm, f"has {count} experts in {name}, fewer than ranks")
    for own, parameter in module.named_parameters():
        if parameter.dim() < 2 or len(parameter) != count:
            raise _refusal(causal_lm, f"has {name}.{own}, which is shared by the experts")
    return _cut_along(name, module, 0, _even_sizes(count, num_ranks))


def _cut_along(name: str, module: Any, dim: int, ranges: list[tuple[int, int]]) -> dict[str, Cut]:
    """Cuts of a linear layer or embedding, or of experts.

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
        if style != EXPERTS:  # they are a region of their own
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
