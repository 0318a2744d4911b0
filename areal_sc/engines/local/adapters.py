"""Adapters of several rows in one pass, beside weights that all rows share.

    y = x W' + b + (m * (x A')) B        A [R, I], B [R, O]; m [T, R]

A and B are those of all adapters of the pass, one behind the other, R ranks together. m has at each
token the scale of its adapter, alpha / r, at the ranks of this adapter, and 0 at all others. So the
product with the weights is made once, and no token sees an adapter that is not its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import nn

from areal_sc.engines.training.adapters.adapter_files import AdapterLayers

_MAX_IDLE_SHARE = 0.5
"""Of the ranks of a stack: so many may be of adapters that a pass does not need."""


@dataclass(frozen=True, eq=False)
class LoadedAdapter:
    """An adapter in host memory.

    Attributes:
        name: for messages.
        layers: its matrices.
    """

    name: str
    layers: AdapterLayers


class AdapterStack:
    """The matrices of several adapters, where the model computes.

    Attributes:
        layers: A [R, I] and B [R, O] by the layer's name; zeros where an adapter has none.
    """

    def __init__(
        self,
        adapters: Iterable[LoadedAdapter],
        targets: Mapping[str, nn.Linear],
    ) -> None:
        self._ranks: dict[LoadedAdapter, slice] = {}
        self._size = 0
        for adapter in adapters:
            self._ranks[adapter] = slice(self._size, self._size + adapter.layers.rank)
            self._size += adapter.layers.rank
        self.layers: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in sorted({name for it in self._ranks for name in it.layers.matrices}):
            layer = targets[name]
            a = layer.weight.new_zeros(self._size, layer.in_features)
            b = layer.weight.new_zeros(self._size, layer.out_features)
            for adapter, ranks in self._ranks.items():
                if matrices := adapter.layers.matrices.get(name):
                    a[ranks].copy_(matrices[0])
                    b[ranks].copy_(matrices[1].T)
            self.layers[name] = a, b

    def covering(
        self, wanted: Iterable[LoadedAdapter], targets: Mapping[str, nn.Linear]
    ) -> AdapterStack:
        """This one, or another one that has all of these adapters, and not too many others."""
        needed = dict.fromkeys(wanted)
        num_ranks = sum(it.layers.rank for it in needed)
        room = num_ranks / (1 - _MAX_IDLE_SHARE)
        if self._size <= room and needed.keys() <= self._ranks.keys():
            return self
        for adapter in self._ranks:
            if adapter not in needed and num_ranks + adapter.layers.rank <= room:
                needed[adapter] = None
                num_ranks += adapter.layers.rank
        return AdapterStack(needed, targets)

    def of_tokens(
        self,
        of_rows: Sequence[LoadedAdapter | None],
        token_rows: npt.NDArray[np.int64],
        device: torch.device,
    ) -> PassAdapters:
        """What a pass computes with.

        Args:
            of_rows: [N] the adapter of each row.
            token_rows: [T] the row of each token.
        """
        scales = np.zeros((len(of_rows), self._size), dtype=np.float32)
        for row, adapter in enumerate(of_rows):
            if adapter is not None:
                scales[row, self._ranks[adapter]] = adapter.layers.scale
        return PassAdapters(self.layers, torch.from_numpy(scales[token_rows]).to(device))


class PassAdapters:
    """The adapters of the tokens of one pass.

    Args:
        layers: see `AdapterStack`.
        scales: [T, R] float32; 0: not of the token's adapter.
    """

    def __init__(
        self, layers: Mapping[str, tuple[torch.Tensor, torch.Tensor]], scales: torch.Tensor
    ) -> None:
        self._layers = layers
        self._scales = scales
        self._is_foreign = scales == 0

    def add_to(self, outputs: torch.Tensor, inputs: torch.Tensor, layer: str) -> None:
        """Adds what the adapters of a layer make of [1, T, I] to [1, T, O]."""
        if matrices := self._layers.get(layer):
            a, b = matrices
            inner = F.linear(inputs[0], a)
            # filled, not multiplied by 0: what a foreign adapter gives may be infinite
            inner = (inner * self._scales).masked_fill_(self._is_foreign, 0).to(a.dtype)
            outputs[0].addmm_(inner, b)


class AdaptedLinear(nn.Linear):
    """A linear layer that some adapters have a part beside: what an `nn.Linear` becomes in place.

    Attributes:
        current_step: of its model.
        layer_name: in its model.
    """

    current_step: Any
    layer_name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[1, T, O] of [1, T, I]."""
        outputs = F.linear(input, self.weight, self.bias)
        adapters: PassAdapters | None = self.current_step.adapters
        if adapters is not None:
            adapters.add_to(outputs, input, self.layer_name)
        return outputs
