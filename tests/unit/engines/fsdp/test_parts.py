"""Boxes of tensors, and that the parts of all ranks together are each parameter once."""

from __future__ import annotations

import random

import pytest
import torch

from areal_sc.config.schema import OptimizerConfig
from areal_sc.engines.fsdp.cuts import Cut, CutParts
from areal_sc.engines.fsdp.optimizer import ShardedOptimizer
from areal_sc.engines.fsdp.sharded_state import ShardedState
from areal_sc.engines.training.parts import Box
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.sequence_parallel import SequencePart


def random_box(shape: tuple[int, ...], numbers: random.Random) -> Box:
    starts = tuple(numbers.randrange(size) for size in shape)
    sizes = tuple(
        numbers.randint(1, size - start) for size, start in zip(shape, starts, strict=True)
    )
    return Box(starts, sizes)


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 4, 5), (2, 1, 3, 2)])
def test_runs_are_where_the_values_of_a_box_lie(shape: tuple[int, ...]) -> None:
    numbers = random.Random(0)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    for box in [Box.whole(shape), *(random_box(shape, numbers) for _ in range(50))]:
        firsts, length = box.runs(shape)
        found = [first + step for first in firsts for step in range(length)]
        assert found == whole[box.within(Box.whole(shape))].flatten().tolist()
    assert len(Box.whole(shape).runs(shape)[0]) == 1


def test_what_two_boxes_have_in_common() -> None:
    numbers = random.Random(1)
    shape = (5, 6)
    for _ in range(200):
        first, second = random_box(shape, numbers), random_box(shape, numbers)
        marks = torch.zeros(shape)
        for box in (first, second):
            marks[box.within(Box.whole(shape))] += 1
        common = first.common(second)
        if common is None:
            assert marks.max() < 2
            continue
        assert common == second.common(first)
        inside = torch.zeros(first.sizes)
        inside[common.within(first)] = 1
        expected = marks[first.within(Box.whole(shape))] == 2
        assert torch.equal(inside.bool(), expected)


def test_each_value_is_given_by_one_rank() -> None:
    """Four tensor ranks, of which two have the same heads, by three ranks that share rows."""
    shape = torch.Size((10, 6))
    whole = Box.whole(shape)
    cuts = {
        "rows": Cut(shape, tuple(whole.narrowed(0, *r) for r in ((0, 2), (2, 3), (5, 2), (7, 3)))),
        "columns": Cut(
            shape, tuple(whole.narrowed(1, *r) for r in ((0, 1), (1, 2), (3, 1), (4, 2)))
        ),
        "copied heads": Cut(shape, tuple(whole.narrowed(0, r // 2 * 5, 5) for r in range(4))),
        "copies": Cut.copies(shape, 4),
        "fewer rows than ranks": Cut.copies(torch.Size((2,)), 4),
    }
    parts = CutParts(cuts, 0, 3)
    for name, cut in cuts.items():
        count = torch.zeros(cut.shape)
        for rank in range(parts.num_ranks):
            box = parts.given_by(name, rank)
            if box is not None:
                count[box.within(Box.whole(cut.shape))] += 1
        assert torch.equal(count, torch.ones(cut.shape)), name


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 2), (5, 4), (8, 4), (23, 3)])
def test_ranks_of_a_sequence_group_have_each_token_once(num_tokens: int, size: int) -> None:
    values = torch.arange(num_tokens) + 1
    found = []
    for rank in range(size):
        part = SequencePart(num_tokens, ProcessGroup(rank, size, torch.device("cpu")))
        own = part.stretch(values[None])[0]
        assert len(own) == part.length
        assert own[: len(part.own)].tolist() == [token + 1 for token in part.own]
        assert not own[len(part.own) :].any()
        found += list(part.own)
    assert found == list(range(num_tokens))


def test_a_rank_without_values_has_no_number_of_updates() -> None:
    """AdamW does not count there, so a neighbour's number must be the one that its node keeps."""
    alone = ProcessGroup(rank=0, size=1, device=torch.device("cpu"))
    parts = CutParts({"weight": Cut.copies(torch.Size((1, 3)), 1)}, rank=1, num_rows_ranks=2)
    model = torch.nn.Linear(3, 1, bias=False)
    model.weight = torch.nn.Parameter(torch.empty(0, 3))
    optimizer = ShardedOptimizer({"weight": model.weight}, OptimizerConfig(), parts, alone, alone)
    parameters = dict(model.named_parameters())
    placed = ShardedState("Linear", parameters, parts, optimizer).tensors()
    assert not any(tensor.box.numel or tensor.is_given for tensor in placed.values())
