"""Weights under the names that model files give them, which are those that servers know.

transformers fuses the experts of a layer into one tensor when it loads them, and renames others.
Trainers publish what they have in memory. As a fused tensor is its experts one after the other,
nothing is copied to take it apart: its bytes get other names and shapes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from transformers.core_model_loading import revert_weight_conversion

from areal_sc.weights.published import BucketLayout

if TYPE_CHECKING:
    from areal_sc.weights.group import NamedTensor

Shape = tuple[int, ...]

_TRIED_SIZE = 4
"""Rows and columns of the small tensors that show how fused ones are taken apart."""


@dataclass(frozen=True)
class StoredNames:
    """What each tensor in memory is called in model files.

    Attributes:
        pieces: name in memory -> names and shapes in the files, in the order of its bytes.
    """

    pieces: Mapping[str, tuple[tuple[str, Shape], ...]]

    @classmethod
    def find(cls, model: Any, stored: Mapping[str, Shape]) -> StoredNames | None:
        """Lets transformers take small tensors apart, and sees where their values go.

        Args:
            model: transformers' model, its values of no interest.
            stored: name and shape of each tensor in the files; {}: not known, as of files that are
                no safetensors.
        Returns: None where a tensor in a file is no run of bytes of one in memory.
        """
        shapes = {name: tuple(value.shape) for name, value in model.named_parameters()}
        stored = stored or shapes
        small = {name: _small(shape) for name, shape in shapes.items()}
        starts = list(accumulate((prod(shape) for shape in small.values()), initial=0))
        numbered = {
            name: torch.arange(start, start + prod(shape)).view(shape)
            for start, (name, shape) in zip(starts, small.items(), strict=False)
        }
        try:
            reverted = revert_weight_conversion(model, numbered)
        except (ValueError, TypeError, KeyError, IndexError, RuntimeError):
            return None  # it depends on sizes
        if not reverted.keys() <= stored.keys() and shapes.keys() <= stored.keys():
            reverted = numbered  # the files have the names of memory after all
        runs = sorted((int(tensor.flatten()[0]), name) for name, tensor in reverted.items())
        names, pieces = list(shapes), {name: list[tuple[str, Shape]]() for name in shapes}
        ends = [start for start, _ in runs[1:]] + starts[-1:]
        for (start, stored_name), end in zip(runs, ends, strict=True):
            values = reverted[stored_name].flatten()
            if not torch.equal(values, torch.arange(start, end)) or stored_name not in stored:
                return None
            owner = names[bisect_right(starts, start) - 1]
            pieces[owner].append((stored_name, stored[stored_name]))
        for name, parts in pieces.items():
            if sum(prod(shape) for _, shape in parts) != prod(shapes[name]):
                return None
        return cls({name: tuple(parts) for name, parts in pieces.items()})

    def split(self, named_tensors: Iterable[NamedTensor]) -> list[NamedTensor]:
        """Views of whole tensors, which may be flat. Raises: KeyError: an unknown name."""
        found: list[NamedTensor] = []
        for name, tensor in named_tensors:
            parts = self.pieces[name]
            values = torch.split(tensor.reshape(-1), [prod(shape) for _, shape in parts])
            found += [(n, v.view(shape)) for (n, shape), v in zip(parts, values, strict=True)]
        return found

    def describe(self, layout: BucketLayout) -> BucketLayout:
        """The same bytes. Raises: KeyError: an unknown name."""
        parts = [
            (stored_name, dtype, shape)
            for name, dtype in zip(layout.names, layout.dtypes, strict=True)
            for stored_name, shape in self.pieces[name]
        ]
        names, dtypes, shapes = zip(*parts, strict=True)
        return BucketLayout(names, dtypes, shapes)


def _small(shape: Shape) -> Shape:
    """Experts, the first of three dimensions, keep their number: each has a name."""
    kept = shape[:-2]
    return (*kept, *(min(size, _TRIED_SIZE) for size in shape[len(kept) :]))
