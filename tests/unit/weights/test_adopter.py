"""Published weights as a rollout worker reads them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_sc.weights.adopter import HeldWeights
from areal_sc.weights.published import WeightsReference

PARTS = {"of two ranks": [torch.tensor([1.0, 2.0]), torch.tensor([3.0])], "whole": [torch.ones(2)]}


class Puller:
    async def pull_weights(self, _: Any) -> AsyncIterator[tuple[str, list[torch.Tensor]]]:
        for name, parts in PARTS.items():
            yield name, parts


async def test_parts_are_joined_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would stand still for seconds, with all requests of the worker."""
    joined_in = list[threading.Thread]()
    join = torch.cat

    def watched(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        joined_in.append(threading.current_thread())
        return join(parts)

    monkeypatch.setattr(torch, "cat", watched)
    plane: Any = SimpleNamespace(puller=Puller())
    weights = WeightsReference(version=3, shards=())
    found = dict(await HeldWeights(plane).read(weights))
    assert found["of two ranks"].tolist() == [1, 2, 3]
    assert found["whole"] is PARTS["whole"][0]
    assert len(joined_in) == 1
    assert joined_in[0] is not threading.current_thread()
