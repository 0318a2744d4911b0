from __future__ import annotations

import pytest
import torch

from areal_sc.engines.training.updates.micro_batches import with_staleness
from areal_sc.transport.packed_rows import PackedRows


def test_staleness_is_counted_from_the_version_that_is_trained() -> None:
    rows = PackedRows({"versions": torch.tensor([-1, 3, 4, 5])}, (3, 1))
    assert with_staleness(rows, 5).fields["staleness"].tolist() == [6, 2, 1, 0]


def test_rows_without_versions() -> None:
    with pytest.raises(ValueError, match="not 'versions'"):
        with_staleness(PackedRows({"loss_mask": torch.ones(1)}, (1,)), 0)
    assert not with_staleness(PackedRows({}, ()), 0).fields
