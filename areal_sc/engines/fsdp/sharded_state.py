"""What a snapshot holds of the FSDP engine: the live tensors of this rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import nn

from areal_sc.engines.fsdp.cuts import CutParts
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer, local_part
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.snapshots import Placed


class ShardedState:
    """A `TrainedState`. Counters of updates are one number each.

    Args:
        architecture: class of the Hugging Face model.
        parameters: what of the model is held, sharded or not.
        parts: of these.
        optimizer: of those of them that are trained.
        further: other tensors that all ranks have alike, on the CPU.
    """

    def __init__(
        self,
        architecture: str,
        parameters: Mapping[str, nn.Parameter],
        parts: CutParts,
        optimizer: ShardedOptimizer,
        further: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.architecture = architecture
        self.optimizer = optimizer
        self._shards = _find_shards(parameters, parts, optimizer)
        for name, values in further.items():
            placed = Placed(values.shape, values.dtype, Box.whole(values.shape), parts.rank == 0)
            self._shards[name] = _StateShard(values, placed)

    def tensors(self) -> dict[str, Placed]:
        return {name: shard.placed for name, shard in self._shards.items()}

    def values(self, given: Iterable[str]) -> Iterator[tuple[str, Box, torch.Tensor]]:
        for name in given:
            yield name, self._shards[name].placed.box, self._shards[name].values

    @contextmanager
    def filling(self, name: str) -> Iterator[torch.Tensor]:
        yield self._shards[name].values


class _StateShard(NamedTuple):
    values: torch.Tensor
    placed: Placed


def _find_shards(
    parameters: Mapping[str, nn.Parameter], parts: CutParts, optimizer: ShardedOptimizer
) -> dict[str, _StateShard]:
    shards: dict[str, _StateShard] = {}
    for name, parameter in parameters.items():
        values, box = local_part(parameter.detach()), parts.box(name)
        is_given = parts.given_by(name, parts.rank) is not None
        placed = Placed(parts.shapes[name], values.dtype, box, is_given)
        shards[f"parameter.{name}"] = _StateShard(values, placed)
    for name, moments in optimizer.moments().items():
        placed = shards[f"parameter.{name}"].placed
        # no updates are counted of what a rank has no values of: its number is none
        box = Box.whole(()) if placed.box.numel else Box.empty(1)
        for kind, values in moments.items():
            number = Placed(values.shape, values.dtype, box, placed.is_given)
            shards[f"{kind}.{name}"] = _StateShard(values, placed if values.dim() else number)
    return shards
