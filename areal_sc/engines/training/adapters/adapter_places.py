"""Adapters beside each other on one base: which tokens of a forward each of them computes.

    tokens     of place 0   │ of place 1 │ of place 3      in this order; no one has a token of 2
    base       ───────────── one product ────────────
    adapters   x A0' B0'    │ x A1' B1'  │ x A3' B3'

No product has tokens of two places: what one of them computes is never a part of another, not even
as a zero times a number that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Final

import torch
import torch.nn.functional as F

from areal_sc.config.lora_settings import LoraConfig
from areal_sc.engines.training.packed_attention import PackedLayout
from areal_sc.errors import ModelError

NO_PLACE: Final = -1
"""Of padding."""


class AdapterPlaces:
    """The adapters of all layers of one model.

    Attributes:
        ranks: [places] int64 on the CPU, the rank of each, up to `lora.rank`: what its A and B have
            beyond it is 0, and stays 0.
    """

    def __init__(self, lora: LoraConfig) -> None:
        self.ranks = torch.full((lora.places,), lora.rank, dtype=torch.int64)
        self._alpha = lora.alpha
        self._sizes: list[tuple[int, int]] = []
        self._num_tokens = 0

    def scale(self, place: int) -> float:
        """Of the product of its A and B."""
        return self._alpha / int(self.ranks[place])

    def lay_out(
        self,
        of_runs: Sequence[int],
        layout: PackedLayout,
        also: Collection[int],
        *,
        are_padded: bool,
    ) -> None:
        """From now on forwards are of these tokens, and so are their backward passes.

        Args:
            of_runs: the place of each row or run, ascending; those behind them are padding.
            layout: of the rows or runs.
            also: places that take part without any token, so that they have a gradient of 0 where
                ranks that have tokens of theirs add gradients up.
            are_padded: the model computes rows that are padded to the longest one.
        """
        lengths, own = layout.lengths, layout.own_tokens
        self._num_tokens = len(own) if layout.part is None else layout.part.length
        if are_padded:
            lengths = (layout.longest,) * len(lengths)
            own = range(sum(lengths))
            self._num_tokens = len(own)
        sizes = dict.fromkeys(also or of_runs[:1] or [0], 0)
        starts = accumulate(lengths, initial=0)
        for place, start, length in zip(of_runs, starts, lengths, strict=False):
            common = min(own.stop, start + length) - max(own.start, start)
            sizes[place] = sizes.get(place, 0) + max(0, common)
        rest = self._num_tokens - sum(sizes.values())
        self._sizes = sorted(sizes.items()) + ([(NO_PLACE, rest)] if rest else [])

    def added(
        self,
        inputs: torch.Tensor,
        of_place: Callable[[int], tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """[..., O] what the adapters of a layer add, of [..., I].

        Args: of_place: its A [r, I] and B [O, r].
        Raises: ModelError: the layer does not get the tokens that were laid out.
        """
        tokens = inputs.flatten(0, -2)
        if len(tokens) != self._num_tokens:
            raise ModelError(
                f"a layer with an adapter gets {len(tokens)} of {self._num_tokens} tokens, so it "
                "is not known whose they are; expected actor.lora.places=1, or actor.lora.targets "
                "without that layer"
            )
        pieces = torch.split(tokens, [size for _, size in self._sizes])
        found = list[torch.Tensor]()
        for (place, _), piece in zip(self._sizes, pieces, strict=True):
            if place == NO_PLACE:
                found.append(piece.new_zeros(len(piece), found[0].shape[1]))
            else:
                a, b = of_place(place)
                found.append(F.linear(F.linear(piece, a), b) * self.scale(place))
        whole = found[0] if len(found) == 1 else torch.cat(found)
        return whole.view(*inputs.shape[:-1], whole.shape[-1])
