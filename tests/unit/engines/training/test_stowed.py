"""Tensors that are moved away, and back, under whoever holds them."""

from __future__ import annotations

import torch

from areal_sc.engines.training.stowed import Stowed


def test_views_and_optimizers_have_what_they_had() -> None:
    parameter = torch.nn.Parameter(torch.randn(5, 3))
    shard = torch.nn.Parameter(parameter.detach())  # of the same memory, as an optimizer has it
    part, other, empty = parameter.detach()[1:3], torch.arange(7), torch.empty(0)
    before = [it.detach().clone() for it in (parameter, part, other)]
    stowed = Stowed([parameter.detach(), part, other, empty, other])
    assert parameter.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    stowed.bring_back()
    assert all(map(torch.equal, (parameter, part, other), before))
    with torch.no_grad():
        shard.add_(1)
    assert torch.equal(part, before[1] + 1)
    assert shard.data_ptr() == parameter.data_ptr()


def test_what_a_file_is_mapped_for_stays(tmp_path: object) -> None:
    mapped = torch.from_file(f"{tmp_path}/file", shared=True, size=4)
    mapped.fill_(3)
    Stowed([mapped]).bring_back()
    assert mapped.tolist() == [3] * 4
