"""What the ranks give of their weights: whole parameters, and each rank's share of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from areal_sc.engines.training.parts import Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.whole_tensors import GATHERED_BYTES, Values, gather_whole
from areal_sc.engines.weight_group import NamedTensor, layout_of, split_into_buckets
from areal_sc.weights import BucketLayout


@dataclass(eq=False)
class Publication:
    """The weights of one engine, as `TrainEngine` gives them. All ranks must make the same calls.

    Args:
        names: of the parameters, in the order of publication; tied ones once.
        parts: of them.
        take_values: gives the live ones, at the start of a publication; all ranks ask for them.
        world: all ranks.
        dtype: of what is published.
    """

    names: Sequence[str]
    parts: Parts
    take_values: Callable[[], Values]
    world: ProcessGroup
    dtype: torch.dtype

    def whole(self, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        return self._whole(self.take_values(), bucket_bytes)

    def _whole(self, live: Values, bucket_bytes: int) -> Iterator[list[NamedTensor]]:
        for bucket in split_into_buckets(self._unfilled(), bucket_bytes):
            names = [name for name, _ in bucket]
            yield gather_whole(names, live, self.parts, self.world, self.dtype)

    def own_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        """The rows that this rank has, or else its share of tensors that all ranks gather."""
        ranges = {name: self._range(name) for name in self.names}
        unfilled = {
            name: torch.empty(len(own), dtype=self.dtype, device="meta")
            for name, own in ranges.items()
            if own
        }

        live = self.take_values()

        def values() -> Iterator[torch.Tensor]:
            if self.parts.are_row_ranges:
                for name in unfilled:
                    yield live(name).flatten().to(self.dtype)
                return
            for bucket in self._whole(live, GATHERED_BYTES):
                for name, whole in bucket:
                    if name in unfilled:
                        yield whole.flatten()[ranges[name].start : ranges[name].stop]

        own = values()
        return unfilled, through_pinned_memory(own) if self.world.device.type == "cuda" else own

    def layouts(self, bucket_bytes: int) -> list[BucketLayout]:
        return [layout_of(bucket) for bucket in split_into_buckets(self._unfilled(), bucket_bytes)]

    def _range(self, name: str) -> range:
        """This rank's range of the flat parameter."""
        shape, world = self.parts.shapes[name], self.world
        if self.parts.are_row_ranges:
            box = self.parts.box(name)
            first = sum(box.starts[:1]) * shape[1:].numel()
            return range(first, first + box.numel)
        bounds = [rank * shape.numel() // world.size for rank in (world.rank, world.rank + 1)]
        return range(*bounds)

    def _unfilled(self) -> Iterator[NamedTensor]:
        for name in self.names:
            yield name, torch.empty(self.parts.shapes[name], dtype=self.dtype, device="meta")


def through_pinned_memory(tensors: Iterator[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Copies on the host of tensors on a GPU, which may be overwritten afterwards.

    A GPU writes to pinned memory much faster than to other memory, and while one copy is read, the
    next one is on its way. torch keeps the memory for later ones.
    """
    copies: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
    for tensor in tensors:
        try:
            copies.append(_begin_copy(tensor))
        except RuntimeError:  # there is no such memory; other ranks may wait for the rest
            for _ in tensors:
                pass
            raise
        if len(copies) > 1:
            yield _arrived(*copies.popleft())
    for arriving in copies:
        yield _arrived(*arriving)


def _begin_copy(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return copy, event


def _arrived(copy: torch.Tensor, event: torch.cuda.Event) -> torch.Tensor:
    event.synchronize()
    return copy
