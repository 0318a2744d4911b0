from __future__ import annotations

import pytest
import torch

from areal_sc.transport.packed_rows import PackedRows


def rows() -> PackedRows:
    return PackedRows({"ids": torch.arange(6)}, (1, 0, 2, 3), (0.0, 1.0, 2.0, 3.0))


def test_rows_are_taken_in_the_given_order() -> None:
    taken = rows().take([3, 1, 0])
    assert taken.fields["ids"].tolist() == [3, 4, 5, 0]
    assert taken.lengths == (3, 0, 1)
    assert taken.advantages == (3.0, 1.0, 0.0)
    assert taken.starts == (0, 3, 3)


def test_no_rows_can_be_taken() -> None:
    taken = rows().take([])
    assert (taken.num_rows, taken.num_tokens, taken.starts) == (0, 0, ())
    assert taken.fields["ids"].dtype == torch.int64


def test_fields_and_advantages_must_fit_the_rows() -> None:
    with pytest.raises(ValueError, match="6 tokens"):
        PackedRows({"ids": torch.arange(5)}, (1, 5))
    with pytest.raises(ValueError, match="6 tokens"):
        PackedRows({"ids": torch.zeros(2, 3)}, (1, 5))
    with pytest.raises(ValueError, match="1 advantages for 2 rows"):
        PackedRows({"ids": torch.arange(6)}, (1, 5), (0.5,))
