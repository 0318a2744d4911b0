"""Rows of supervised training as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from areal_sc.errors import WorkflowError
from areal_sc.workers.rank_updates import packed


def test_rows_of_all_kinds_of_numbers_arepacked() -> None:
    rows: list[Any] = [[1, 2], np.array([3]), torch.tensor([4, 5]), []]
    assert torch.equal(packed(rows, torch.int32), torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32))
    masks = packed([[True, 0], np.array([1.0])], torch.bool)
    assert torch.equal(masks, torch.tensor([True, False, True]))
    assert packed([], torch.bool).dtype == torch.bool


@pytest.mark.parametrize(
    ("row", "dtype"),
    [([1, 2.5], torch.int32), ([2**31], torch.int32), ([0.5], torch.bool), ([2], torch.bool)],
)
def test_numbers_that_would_become_others_are_refused(row: list[Any], dtype: torch.dtype) -> None:
    with pytest.raises(WorkflowError, match=r"has numbers that torch\..* cannot hold"):
        packed([[1], row], dtype)
