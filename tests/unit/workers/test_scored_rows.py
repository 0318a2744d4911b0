"""What a reward model reads of the rows of a batch."""

from __future__ import annotations

import pytest
import torch

from areal_sc.transport.packed_rows import PackedRows
from areal_sc.workers.rank_updates import read_to_end


@pytest.mark.parametrize(
    ("mask", "read"),
    [
        ([0, 1, 1, 1], [10, 11, 12, 13, 13]),
        ([0, 1, 0, 1], [10, 11, 12, 13, 13]),  # several turns
        ([0, 1, 0, 0], [10, 11, 11]),  # what follows the last answer is not read
        ([0, 1], [10, 11, 11]),
    ],
)
def test_a_row_is_read_up_to_its_last_trained_token(mask: list[int], read: list[int]) -> None:
    ids = torch.arange(10, 10 + len(mask), dtype=torch.int32)
    two = {"input_ids": ids.repeat(2), "loss_mask": torch.tensor(mask, dtype=torch.bool).repeat(2)}
    rows = read_to_end(PackedRows(two, (len(mask), len(mask))))
    assert rows.lengths == (len(read), len(read))
    assert rows.fields["input_ids"].tolist() == read * 2
    assert rows.fields["loss_mask"].tolist() == ([False] * (len(read) - 1) + [True]) * 2


def test_a_rank_without_rows() -> None:
    nothing = PackedRows({}, ())
    assert read_to_end(nothing) is nothing
