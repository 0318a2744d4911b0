"""Which part of each parameter a rank has: one box of its values.

Every rank knows the boxes of all: who writes, sends or reads what needs no exchange. Which boxes
there are is the engine's; snapshots, exports and publication ask for no more than this.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A block of a tensor: along each dimension the first index and the number of indices."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def empty(cls, num_dims: int) -> Box:
        return cls((0,) * num_dims, (0,) * num_dims)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        return tuple(start + size for start, size in zip(self.starts, self.sizes, strict=True))

    def narrowed(self, dim: int, start: int, size: int) -> Box:
        """A range of this box along one dimension; `start` counts from the box's own."""
        starts, sizes = list(self.starts), list(self.sizes)
        starts[dim] += start
        sizes[dim] = size
        return Box(tuple(starts), tuple(sizes))

    def common(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        firsts = [start - first for start, first in zip(self.starts, outer.starts, strict=True)]
        return tuple(slice(f, f + size) for f, size in zip(firsts, self.sizes, strict=True))

    def runs(self, shape: Sequence[int]) -> tuple[list[int], int]:
        """Where its values lie in the flat tensor of this shape: first index of each run; length.

        The runs are in the order of the box's own values.
        """
        num_joined = len(shape)  # dimensions from here on are whole, and so in one run
        while num_joined and self.sizes[num_joined - 1] == shape[num_joined - 1]:
            num_joined -= 1
        first_joined = max(num_joined - 1, 0)
        length = prod(self.sizes[first_joined:])
        if not self.numel:
            return [], length
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        firsts = [sum(map(int.__mul__, self.starts, strides))]
        for dim in range(first_joined):
            steps = range(self.sizes[dim])
            firsts = [first + step * strides[dim] for first in firsts for step in steps]
        return firsts, length


class Parts(ABC):
    """The parts of all parameters, on all ranks.

    Attributes:
        shapes: of the whole parameters, by their Hugging Face names.
        rank: this one.
        num_ranks: of the engine.
        are_row_ranges: each rank has a run of rows, those of the ranks before it above it.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], rank: int, num_ranks: int) -> None:
        self.shapes = shapes
        self.rank = rank
        self.num_ranks = num_ranks
        self.are_row_ranges = False

    @abstractmethod
    def box(self, name: str, rank: int | None = None) -> Box:
        """The box of a rank, by default of this one; it may be empty."""

    @abstractmethod
    def given_by(self, name: str, rank: int) -> Box | None:
        """What a rank gives of a whole parameter, of which each value is given once."""
