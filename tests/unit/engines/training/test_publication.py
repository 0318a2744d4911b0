from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from areal_sc.engines.training.whole_tensors import through_pinned_memory


def test_each_copy_is_awaited_while_the_next_one_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With what stands in for CUDA: memory that is not pinned, and events that only note."""
    empty, story = torch.empty, list[str]()

    class Event:
        def record(self) -> None:
            self.number = sum(line.startswith("copied") for line in story)
            story.append(f"copied {self.number}")

        def synchronize(self) -> None:
            story.append(f"awaited {self.number}")

    def unpinned(*args: Any, pin_memory: bool, **kwargs: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*args, **kwargs)

    def overwritten() -> Iterator[torch.Tensor]:
        whole = torch.zeros(3)
        for value in range(3):
            yield whole.fill_(value)

    monkeypatch.setattr(torch, "empty", unpinned)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = []
    for number, copy in enumerate(through_pinned_memory(overwritten())):
        story.append(f"read {number}")
        found.append(copy.tolist())
    assert found == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert story == [
        *("copied 0", "copied 1", "awaited 0", "read 0"),
        *("copied 2", "awaited 1", "read 1"),
        *("awaited 2", "read 2"),
    ]


def test_without_pinned_memory_the_other_ranks_are_not_left_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_gathered = 0

    def gathered() -> Iterator[torch.Tensor]:
        nonlocal num_gathered
        for _ in range(3):
            num_gathered += 1
            yield torch.zeros(3)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        list(through_pinned_memory(gathered()))
    assert num_gathered == 3
