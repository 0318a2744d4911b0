"""Whole parameters and the ranks' parts of them: one rank's values spread, all ranks' gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_sc.engines.training.parts import Box, Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.weight_group import NamedTensor, split_into_buckets

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
