"""Whole parameters and the ranks' parts of them: one rank's values spread, all ranks' gathered.

`Publication` is what the ranks give of their weights: whole parameters, or each rank's share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_sc.engines.training.parts import Box, Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.weights.group import NamedTensor, layout_of, split_into_buckets
from areal_sc.weights.published import BucketLayout

GATHERED_BYTES = 4 << 20
"""Small parameters are gathered together, up to this size: each collective costs a round trip."""

SENT_BYTES = 64 << 20
"""Most bytes of weights in one message, unless a row has more, when a model is loaded, or written
where rank 0 alone sees files."""

Values = Callable[[str], torch.Tensor]
"""This rank's part of a parameter, with the shape of its box."""


def receive_part(
    target: torch.Tensor,
    source: torch.Tensor | None,
    name: str,
    parts: Parts,
    world: ProcessGroup,
) -> None:
    """Every rank gets its box of a parameter from rank 0, which has all of it as `source`.

    All ranks are sent all of it, some rows at a time: several may have the same values, and rank 0
    sends them once. No rank needs memory for more than `SENT_BYTES`, or one row.
    """
    whole, own = Box.whole(parts.shapes[name]), parts.box(name)
    for box in runs_of_rows(whole, SENT_BYTES // target.element_size()):
        if source is None:
            values = torch.empty(box.sizes, dtype=target.dtype, device=world.device)
        else:  # a view, where nothing has to change
            sent = source[box.within(whole)]
            values = sent.to(world.device, target.dtype).contiguous()
        if world.size > 1:
            dist.broadcast(values, group=world.handle, group_src=0)
        if (common := own.common(box)) is not None:
            target[common.within(own)].copy_(values[common.within(box)])


def runs_of_rows(box: Box, max_values: int) -> Iterator[Box]:
    """The box in parts of so many values at most, but of one row at least."""
    if not box.sizes:
        yield box
        return
    step = max(1, max_values // max(1, prod(box.sizes[1:])))
    for first in range(0, box.sizes[0], step):
        yield box.narrowed(0, first, min(step, box.sizes[0] - first))


def gather_whole(
    names: Iterable[str],
    values: Values,
    parts: Parts,
    world: ProcessGroup,
    dtype: torch.dtype,
) -> list[NamedTensor]:
    """Whole tensors in `dtype`, on this rank's device. All ranks make the call.

    Args:
        values: asked of what this rank gives.
    Returns: by name; one that is whole already, and has this dtype, is itself returned.
    """
    if world.size == 1:
        return [(name, values(name).to(world.device, dtype)) for name in names]
    unfilled = (
        (name, torch.empty(parts.shapes[name], dtype=dtype, device="meta")) for name in names
    )
    whole: list[NamedTensor] = []
    for few in split_into_buckets(unfilled, GATHERED_BYTES):
        whole += _gather_together([name for name, _ in few], values, parts, world, dtype)
    return whole


def _gather_together(
    names: Sequence[str],
    values: Values,
    parts: Parts,
    world: ProcessGroup,
    dtype: torch.dtype,
) -> list[NamedTensor]:
    given = [
        {name: box for name in names if (box := parts.given_by(name, rank)) is not None}
        for rank in range(world.size)
    ]
    sizes = [sum(box.numel for box in boxes.values()) for boxes in given]
    own = torch.empty(sizes[world.rank], dtype=dtype, device=world.device)
    first = 0
    for name, box in given[world.rank].items():
        own[first : first + box.numel] = values(name).flatten()
        first += box.numel
    shapes = {name: parts.shapes[name] for name in names}
    whole = {name: own.new_empty(shape) for name, shape in shapes.items()}
    for boxes, received in zip(given, _exchange(own, sizes, world), strict=True):
        first = 0
        for name, box in boxes.items():
            piece = received[first : first + box.numel].view(box.sizes)
            whole[name][box.within(Box.whole(shapes[name]))] = piece
            first += box.numel
    return list(whole.items())


def _exchange(
    own: torch.Tensor, sizes: Sequence[int], world: ProcessGroup
) -> Iterator[torch.Tensor]:
    """What each rank gives, at least `sizes` values, on all ranks; in rank order.

    One collective is faster than one for each rank, but pads all to the longest: it is used where
    that costs at most as much as what is given.
    """
    longest = max(sizes)
    if longest * world.size <= 2 * sum(sizes):
        padded = F.pad(own, (0, longest - len(own)))
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=world.handle)
        yield from gathered
        return
    for rank, size in enumerate(sizes):
        received = own if rank == world.rank else own.new_empty(size)
        if size:
            dist.broadcast(received, group=world.handle, group_src=rank)
        yield received


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
