"""Megatron-core's parameters and optimizer state under Hugging Face names."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from areal_sc.engines.megatron.mapping import MegatronParts, Piece, Slot
from areal_sc.engines.megatron.optimizer import KINDS, DistributedAdamW
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.snapshots import Placed

_STEP = "step"


class MegatronState:
    """A `TrainedState`, and the live weights for publication and export.

    Args:
        architecture: class of the Hugging Face model.
        parts: of its parameters.
        parameters: this rank's, by their slots.
        optimizer: of the parameters.
    Attributes:
        parts: of the Hugging Face parameters.
    """

    def __init__(
        self,
        architecture: str,
        parts: MegatronParts,
        parameters: Mapping[Slot, nn.Parameter],
        optimizer: DistributedAdamW,
    ) -> None:
        self.architecture = architecture
        self.parts = parts
        self._parameters = parameters
        self.optimizer = optimizer
        self._pieces: dict[str, list[Piece]] = {}
        self._pieces_in: dict[Slot, list[Piece]] = {}
        for piece in parts.pieces:
            self._pieces.setdefault(piece.name, []).append(piece)
            self._pieces_in.setdefault(piece.slot, []).append(piece)
        mapped, own = {piece.slot for piece in parts.pieces}, parameters.keys()
        assert mapped == own, f"not mapped, or not there: {sorted(mapped ^ own)}"

    def live_values(self, name: str) -> torch.Tensor:
        """This rank's box of a parameter, in the dtype of computation."""
        pieces = self._pieces[name]
        read = [piece.read(self._parameters[piece.slot].detach()) for piece in pieces]
        return read[0] if len(read) == 1 else torch.cat(read)

    def tensors(self) -> dict[str, Placed]:
        found: dict[str, Placed] = {}
        for name, shape in self.parts.shapes.items():
            is_given = self.parts.given_by(name, self.parts.rank) is not None
            for kind in KINDS:
                box = self.parts.box(name)
                found[f"{kind}.{name}"] = Placed(shape, torch.float32, box, is_given)
            number = Placed(torch.Size(()), torch.float32, Box.whole(()), is_given)
            found[f"{_STEP}.{name}"] = number
        return found

    def values(self, given: Iterable[str]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        wanted = set(given)
        for kind in KINDS:
            for slot, parameter in self._parameters.items():
                whole = self.optimizer.whole(kind, parameter)
                for piece in self._pieces_in[slot]:
                    name = f"{kind}.{piece.name}"
                    if name in wanted:
                        yield name, piece.box, piece.view(whole)
        number = torch.tensor(float(self.optimizer.num_updates))
        for name in self.parts.shapes:
            if f"{_STEP}.{name}" in wanted:
                yield f"{_STEP}.{name}", Box.whole(()), number

    @contextmanager
    def filling(self, name: str) -> Iterator[torch.Tensor]:
        kind, _, tensor = name.partition(".")
        if kind == _STEP:  # the same number for all: `optimizer.num_updates`
            yield torch.zeros(())
            return
        box = self.parts.box(tensor)
        values = torch.empty(box.sizes)
        yield values
        self.write(kind, tensor, values)

    def write(self, kind: str, name: str, values: torch.Tensor) -> None:
        """Sets this rank's box of a Hugging Face tensor.

        Args:
            kind: `parameter`, `exp_avg` or `exp_avg_sq`.
            values: with the shape of the box.
        """
        box = self.parts.box(name)
        for piece in self._pieces.get(name, ()):
            own = values[piece.box.within(box)]
            self.optimizer.change(
                kind, self._parameters[piece.slot], functools.partial(piece.write, values=own)
            )
