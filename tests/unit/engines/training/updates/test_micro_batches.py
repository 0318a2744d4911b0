from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from areal_sc.engines.training.packed_attention import PackedLayout
from areal_sc.engines.training.row_numbers import count_rows
from areal_sc.engines.training.updates.micro_batches import (
    MicroBatch,
    TokenFields,
    make_micro_batch,
    trained_tokens,
    with_staleness,
)
from areal_sc.metadata import RowMetadata
from areal_sc.token_fields import field_type
from areal_sc.transport.packed_rows import PackedRows, RowValues


def test_staleness_is_counted_from_the_version_that_is_trained() -> None:
    rows = PackedRows({"versions": torch.tensor([-1, 3, 4, 5])}, (3, 1))
    assert with_staleness(rows, 5).fields["staleness"].tolist() == [6, 2, 1, 0]


def test_rows_without_versions() -> None:
    with pytest.raises(ValueError, match="not 'versions'"):
        with_staleness(PackedRows({"loss_mask": torch.ones(1)}, (1,)), 0)
    assert not with_staleness(PackedRows({}, ()), 0).fields


def rows_with_fields() -> PackedRows:
    """Three rows of two groups, which share `page`."""
    fields = {
        "input_ids": torch.arange(9, dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1, 1] * 3, dtype=torch.bool),
    }
    values = {
        "style": RowValues(
            torch.arange(6.0).view(3, 2), ((0, 1), (1, 2), (2, 3)), field_type("row:float32[2]")
        ),
        "found": RowValues(torch.arange(5), ((0, 0), (0, 4), (4, 5)), field_type("row:int64[?]")),
        "page": RowValues(
            torch.tensor([[1, 2], [3, 4]]), ((0, 1), (1, 2), (0, 1)), field_type("group:int64[2]")
        ),
    }
    metadata = tuple(RowMetadata(it % 2, 0, 3, 0.0, 0, (), it) for it in range(3))
    return PackedRows(fields, (3, 3, 3), None, metadata, values)


def micro_batch(rows: PackedRows, chosen: list[int]) -> MicroBatch:
    trained = trained_tokens(rows, None)
    ((numbers, _),) = count_rows([rows], [trained], 0, lambda own: [own])
    device = torch.device("cpu")

    def layout_of(lengths: Sequence[int], device: torch.device, parents: object) -> PackedLayout:
        assert parents is None
        return PackedLayout.of(lengths, device, attention_width=4)

    return make_micro_batch(rows, chosen, trained, layout_of, device, numbers=numbers)


def test_a_loss_reads_values_of_rows_and_of_groups() -> None:
    rows = rows_with_fields()
    batch = micro_batch(rows, [2, 0])
    of_rows, of_tokens = batch.loss_rows, TokenFields(batch, rows)
    assert of_rows is not None
    assert of_rows.fields["style"].tolist() == [[4, 5], [0, 1]]
    assert [it.tolist() for it in of_rows.fields["found"]] == [[4], []]
    assert [it.tolist() for it in of_rows.fields["page"]] == [[1, 2], [1, 2]]
    first, second = (it.data_ptr() for it in of_rows.fields["page"])
    assert first == second, "once a group"
    assert of_tokens["style"].tolist() == [[4, 5], [4, 5], [0, 1], [0, 1]]
    with pytest.raises(
        ValueError, match=r"'page' has a tensor a row, .* tokens.rows.fields\['page"
    ):
        of_tokens["page"]
    for fields in (of_tokens, of_rows.fields):
        known = "'found', .*'page', 'style'"
        with pytest.raises(ValueError, match=rf"group 0, episode 0\) have .*{known}\], not 'gone'"):
            fields["gone"]


def test_a_rank_without_rows_reads_any_field() -> None:
    batch = micro_batch(PackedRows({}, ()), [])
    assert batch.loss_rows is not None
    assert batch.loss_rows.fields["style"].shape == (0,)
    own = micro_batch(rows_with_fields(), [])
    assert own.loss_rows is not None
    assert own.loss_rows.fields["style"].shape == (0, 2)
    assert own.loss_rows.fields["page"] == []
