"""Low-rank adapters (LoRA, arXiv:2106.09685) of linear layers whose own parameters stay fixed.

    y = x W' + b + scale (x A') B'      W [O, I], A [r, I], B [O, r]; scale = alpha / r

A and B are parameters of the layer itself: all others keep their names, and what cuts, spreads,
rounds or compiles a linear layer finds a linear layer. B begins at zero, so that a new adapter
changes nothing. `merged_values` gives the weights W + scale B A, under the model's own names.

There may be several adapters beside each other (`actor.lora.places`), each for rows of its own. The
one of place 0 is named as if it were alone; those of place k are `lora_A_k` and `lora_B_k`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.config.schema import ActorConfig, ModelHead
from areal_sc.engines.training.adapters.adapter_places import AdapterPlaces
from areal_sc.engines.training.causal_lm import build_without_parameters
from areal_sc.engines.training.parts import Box, Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.streamed_layers import decoder_layers
from areal_sc.engines.training.whole_tensors import Values, gather_whole
from areal_sc.errors import ModelError
from areal_sc.sizing.adapter_folder import check_adapter
from areal_sc.sizing.model_folder import VALUE_HEAD

LORA_A, LORA_B = "lora_A", "lora_B"
_NAME = re.compile(rf"(.*\.)?({LORA_A}|{LORA_B})(?:_(\d+))?")


class LoraLinear(nn.Linear):
    """A linear layer with an adapter: what an `nn.Linear` becomes in place.

    Attributes:
        lora_A, lora_B: [r, I] and [O, r]; of place 0, those of others as `at_place` names them.
        scale: of their product.
        places: of several adapters; None: there is one.
        dropout: share of its inputs that are 0 for the adapter, and the others larger, where a
            gradient is asked for.
        is_adapted: the adapter counts.
    """

    lora_A: nn.Parameter
    lora_B: nn.Parameter
    scale: float
    places: AdapterPlaces | None = None
    dropout: float
    is_adapted: bool

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., O] of [..., I]."""
        outputs = F.linear(input, self.weight, self.bias)
        return outputs + self.added(input) if self.is_adapted else outputs

    def added(self, input: torch.Tensor) -> torch.Tensor:
        """[..., O] what the adapter adds, or that of each token's place."""
        if self.places is not None:
            return self.places.added(input, self._of_place)
        if self.dropout and torch.is_grad_enabled():
            input = F.dropout(input, self.dropout)
        return F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale

    def _of_place(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        a, b = (self._parameters[at_place(own, place)] for own in (LORA_A, LORA_B))
        assert a is not None
        assert b is not None
        return a, b

    def scale_at(self, place: int) -> float:
        """What the product of a place's A and B is multiplied by."""
        return self.scale if self.places is None else self.places.scale(place)


def at_place(name: str, place: int) -> str:
    """What the parameter of place 0 that has this name is called at another place."""
    return f"{name}_{place}" if place else name


def adapter_place(name: str) -> int | None:
    """The place whose adapter has the parameter of this name; None: it is of none."""
    found = _NAME.fullmatch(name)
    return None if found is None else int(found[3] or 0)


def common_name(name: str) -> str:
    """The name that the parameter of a place has at place 0."""
    place = adapter_place(name)
    return name.removesuffix(f"_{place}") if place else name


def is_of_adapter(name: str) -> bool:
    """Whether this is the name of a parameter of an adapter."""
    return adapter_place(name) is not None


def add_adapters(causal_lm: Any, lora: LoraConfig, head: ModelHead = ModelHead.lm) -> None:
    """Freezes a model, and gives the targeted layers adapters without values.

    A value head goes on to be trained: it is new.

    Args:
        causal_lm: Hugging Face model, its parameters on any device.
    Raises: ModelError: a target names no linear layer of its decoder layers, or with several places
        one of experts.
    """
    for name, parameter in causal_lm.named_parameters():
        parameter.requires_grad_(head is ModelHead.value and name == VALUE_HEAD)
    places = AdapterPlaces(lora) if lora.places > 1 else None
    modules = targeted(causal_lm, lora.targets)
    of_experts = {id(it) for name, it in causal_lm.named_modules() if ".experts." in name}
    if places is not None and any(id(module) in of_experts for module in modules):
        raise ModelError(
            f"actor.lora.targets: expected no layer of the experts of {type(causal_lm).__name__} "
            f"with actor.lora.places={lora.places}: experts get tokens of all places, mixed"
        )
    for module in modules:
        module.__class__ = LoraLinear
        outputs, inputs = module.weight.shape
        for place in range(lora.places):
            for name, shape in ((LORA_A, (lora.rank, inputs)), (LORA_B, (outputs, lora.rank))):
                values = nn.Parameter(module.weight.new_empty(shape))
                module.register_parameter(at_place(name, place), values)
        adapted = cast(LoraLinear, module)
        adapted.scale, adapted.places = lora.alpha / lora.rank, places
        adapted.dropout = lora.dropout
        adapted.is_adapted = True


def describe_adapter(config: ActorConfig) -> str:
    """What `config` trains of the model whose folder is `config.path`; reads no weights.

    Raises: ModelError: see `add_adapters`; or there is no adapter to begin from.
    """
    if config.lora.path:
        check_adapter(config.lora)
    causal_lm = build_without_parameters(Path(config.path), config.head)
    add_adapters(causal_lm, config.lora, config.head)
    trained = sum(p.numel() for p in causal_lm.parameters() if p.requires_grad)
    count = len(lora_layers(causal_lm))
    return f"adapter of rank {config.lora.rank} beside {count} layers: {trained} parameters"


def lora_layers(causal_lm: Any) -> dict[str, LoraLinear]:
    """The layers that have an adapter, by their names."""
    named = causal_lm.named_modules()
    return {name: module for name, module in named if isinstance(module, LoraLinear)}


def new_values(name: str, shape: Sequence[int], seed: int) -> torch.Tensor:
    """What a parameter of a new adapter begins with, float32 on the CPU, on any rank the same.

    B is 0. A is uniform up to 1 / sqrt(I), as peft draws it.

    Args: name: that of place 0, whatever the place.
    """
    values = torch.zeros(tuple(shape))
    if name.endswith(LORA_A):
        generator = torch.Generator().manual_seed(_seed_of(name, seed))
        bound = 1 / math.sqrt(shape[1])
        values.uniform_(-bound, bound, generator=generator)
    return values


def merged_values(causal_lm: Any, values: Values, parts: Parts, world: ProcessGroup) -> Values:
    """Parts of the model's own parameters, those of adapted layers with place 0's adapter in them.

    All ranks make the call, which gathers the adapters' A; what it gives needs no exchange. The
    rows of W and B that a rank has are the same ones.

    Args:
        values: live ones, without regard to adapters.
    """
    layers = lora_layers(causal_lm)
    names = [f"{name}.{LORA_A}" for name in layers]
    gathered = dict(gather_whole(names, values, parts, world, torch.float32))

    def merged(name: str) -> torch.Tensor:
        module, _, own_name = name.rpartition(".")
        own = values(name)
        if module not in layers or own_name != "weight":
            return own
        _, columns = parts.box(name).within(Box.whole(parts.shapes[name]))
        a = gathered[f"{module}.{LORA_A}"][:, columns].to(own.device)
        b = values(f"{module}.{LORA_B}")
        return torch.addmm(own.float(), b, a, alpha=layers[module].scale_at(0))

    return merged


@contextmanager
def without_adapters(causal_lm: Any) -> Iterator[None]:
    """Within it the model computes as if it had no adapters."""
    layers = lora_layers(causal_lm).values()
    for layer in layers:
        layer.is_adapted = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_adapted = True


def named_linear(causal_lm: Any) -> dict[str, nn.Linear]:
    """The linear layers in its decoder layers, by their names: adapters may go beside them."""
    names = {id(module): name for name, module in causal_lm.named_modules()}
    return {
        names[id(module)]: module
        for layer in decoder_layers(causal_lm)
        for module in layer.modules()
        if type(module) is nn.Linear
    }


def targeted(causal_lm: Any, targets: Sequence[str]) -> list[nn.Linear]:
    """The layers that adapters go beside. Raises: ModelError: see `add_adapters`."""
    linear = named_linear(causal_lm)
    chosen = {
        target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets
    }
    unknown = [target for target, found in chosen.items() if not found]
    if unknown or not linear:
        ends = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        raise ModelError(
            f"actor.lora.targets: expected names of linear layers in the decoder layers of "
            f"{type(causal_lm).__name__}, which are {ends}; got {', '.join(unknown) or 'all'}"
        )
    wanted = {name for found in chosen.values() for name in found} if targets else set(linear)
    return [module for name, module in linear.items() if name in wanted]


def _seed_of(name: str, seed: int) -> int:
    words = f"{seed} {name}".encode()
    return int.from_bytes(hashlib.blake2b(words, digest_size=7).digest())
