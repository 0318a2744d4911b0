"""Four ranks, as threads with gloo, make whole parameters of their parts, and the other way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from areal_sc.engines.training import whole_tensors
from areal_sc.engines.training.parts import Box, Parts
from areal_sc.engines.training.process_group import ProcessGroup
from areal_sc.engines.training.whole_tensors import gather_whole, receive_part

aten = torch.ops.aten
NUM_RANKS = 4
TIMEOUT = timedelta(seconds=30)
SHAPE = torch.Size((40, 25))
WHOLE = torch.arange(SHAPE.numel(), dtype=torch.float32).view(SHAPE)
ALL = Box.whole(SHAPE)
QUARTERS = {rank: ALL.narrowed(0, 10 * rank, 10) for rank in range(NUM_RANKS)}
BOXES = {
    "by_all": QUARTERS,
    "by_two": {1: ALL.narrowed(1, 0, 20), 3: ALL.narrowed(1, 20, 5)},
    "by_one": {2: ALL},
}


class ListedParts(Parts):
    def __init__(self, rank: int) -> None:
        super().__init__(dict.fromkeys(BOXES, SHAPE), rank, NUM_RANKS)

    def box(self, name: str, rank: int | None = None) -> Box:
        return BOXES[name].get(self.rank if rank is None else rank, Box.empty(2))

    def given_by(self, name: str, rank: int) -> Box | None:
        return BOXES[name].get(rank)


class MadeValues(TorchDispatchMode):
    """Counts the numbers of all tensors that are made in this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket in (aten.empty, aten.new_empty, aten.empty_like):
            self.count += found.numel()
        return found


def on_all_ranks(action: Callable[[ListedParts, ProcessGroup], Any]) -> list[Any]:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        gloo = dist.ProcessGroupGloo(store, rank, NUM_RANKS, TIMEOUT)
        group = ProcessGroup(rank, NUM_RANKS, torch.device("cpu"), gloo)
        return action(ListedParts(rank), group)

    with ThreadPoolExecutor(NUM_RANKS) as threads:
        return list(threads.map(run, range(NUM_RANKS)))


def test_a_parameter_of_few_ranks_needs_no_more_memory_than_one_of_all() -> None:
    def gather(parts: ListedParts, world: ProcessGroup) -> dict[str, int]:
        num_made = {}
        for name in BOXES:
            values = WHOLE[parts.box(name).within(ALL)]
            with MadeValues() as made:
                found = gather_whole([name], {name: values}.__getitem__, parts, world, WHOLE.dtype)
            assert torch.equal(dict(found)[name], WHOLE)
            num_made[name] = made.count
        return num_made

    for num_made in on_all_ranks(gather):
        assert num_made["by_one"] <= num_made["by_all"]
        assert num_made["by_two"] <= num_made["by_all"]


def test_parameters_that_are_gathered_together_keep_their_values() -> None:
    def gather(parts: ListedParts, world: ProcessGroup) -> dict[str, torch.Tensor]:
        def values(name: str) -> torch.Tensor:
            return WHOLE[parts.box(name).within(ALL)] + len(name)

        return dict(gather_whole(BOXES, values, parts, world, torch.bfloat16))

    for found in on_all_ranks(gather):
        assert list(found) == list(BOXES)
        for name, whole in found.items():
            assert torch.equal(whole, (WHOLE + len(name)).bfloat16())


@pytest.mark.parametrize("sent_bytes", [1, 700, 1 << 20])
def test_every_rank_receives_its_box_in_messages_of_that_size(
    sent_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def receive(parts: ListedParts, world: ProcessGroup) -> tuple[bool, int]:
        are_equal, largest = True, 0
        for name in BOXES:
            target = torch.full(parts.box(name).sizes, torch.nan)
            source = WHOLE if world.rank == 0 else None
            with MadeValues() as made:
                receive_part(target, source, name, parts, world)
            are_equal &= torch.equal(target, WHOLE[parts.box(name).within(ALL)])
            largest = max(largest, made.count)
        return are_equal, largest

    monkeypatch.setattr(whole_tensors, "SENT_BYTES", sent_bytes)
    for rank, (are_equal, num_made) in enumerate(on_all_ranks(receive)):
        assert are_equal
        # of each parameter, all of it once; rank 0 sends what it has
        assert num_made == (0 if rank == 0 else WHOLE.numel())


def test_a_single_number_is_received() -> None:
    class OneNumber(ListedParts):
        def box(self, name: str, rank: int | None = None) -> Box:
            return Box.whole(())

    def receive(parts: ListedParts, world: ProcessGroup) -> float:
        target = torch.zeros(())
        number = OneNumber(world.rank)
        number.shapes = {"scale": torch.Size(())}
        receive_part(target, torch.tensor(3.0) if world.rank == 0 else None, "scale", number, world)
        return float(target)

    assert on_all_ranks(receive) == [3.0] * NUM_RANKS
