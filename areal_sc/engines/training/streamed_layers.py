"""A model whose layers have values only while they compute: it computes all, and holds little."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

Read = Callable[[Iterable[str]], Mapping[str, torch.Tensor]]
"""Parameters and buffers by name; buffers that are not stored are left out."""


def decoder_layers(causal_lm: nn.Module) -> list[nn.Module]:
    """The repeated blocks in forward order, without blocks inside of blocks."""
    names = set(getattr(causal_lm, "_no_split_modules", None) or ())
    blocks = [module for module in causal_lm.modules() if type(module).__name__ in names]
    inner = {id(child) for block in blocks for child in block.modules() if child is not block}
    return [block for block in blocks if id(block) not in inner]


def stream_layers(causal_lm: nn.Module, read: Read, num_ranks: int) -> None:
    """Gives a model its values, those of most layers for the time that they compute.

    What is outside of layers, and what is in several of them, keeps its values. So do the first
    layers: as many as make up the share of one of `num_ranks`, less one, which leaves room for the
    layer that computes. One rank alone keeps all.

    Args:
        causal_lm: its parameters have no values, and are on the meta device; others stay as
            they are.
    """
    layers = decoder_layers(causal_lm)
    num_kept = len(layers) if num_ranks == 1 else max(0, len(layers) // num_ranks - 1)
    names_of = {id(module): name for name, module in causal_lm.named_modules()}
    prefixes = [f"{names_of[id(layer)]}." for layer in layers]
    owners = defaultdict[int, set[int | None]](set)
    aliases = defaultdict[int, list[str]](list)
    for name, parameter in causal_lm.named_parameters(remove_duplicate=False):
        owners[id(parameter)].add(
            next((n for n, p in enumerate(prefixes) if name.startswith(p)), None)
        )
        aliases[id(parameter)].append(name)
    streamed = defaultdict[int, list[str]](list)
    for key, names in aliases.items():
        layer = owners[key].pop() if len(owners[key]) == 1 else None
        if layer is not None and layer >= num_kept:
            streamed[layer] += names
        elif causal_lm.get_parameter(names[0]).is_meta:
            _put(causal_lm, read(names))
    _put(causal_lm, read([name for name, _ in causal_lm.named_buffers(remove_duplicate=False)]))
    for index, names in streamed.items():
        _fill_when_called(causal_lm, layers[index], names, read)


def _fill_when_called(
    causal_lm: nn.Module, layer: nn.Module, names: Sequence[str], read: Read
) -> None:
    unfilled = {name: causal_lm.get_parameter(name) for name in names}

    def fill(*_: Any) -> None:
        _put(causal_lm, read(names))

    def drop(*_: Any) -> None:
        _put(causal_lm, unfilled)

    layer.register_forward_pre_hook(fill)
    layer.register_forward_hook(drop, always_call=True)


def _put(causal_lm: nn.Module, named: Mapping[str, torch.Tensor]) -> None:
    for name, values in named.items():
        path, _, own_name = name.rpartition(".")
        module = causal_lm.get_submodule(path)
        if own_name in module._parameters and not isinstance(values, nn.Parameter):
            values = nn.Parameter(values, requires_grad=False)
        setattr(module, own_name, values)
