"""Rows of a worker's store as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_sc.engines.tokenizer import load_tokenizer
from areal_sc.errors import ShardGone
from areal_sc.metadata import BatchMetadata, Columns, RowMetadata, RowRun, ShardMetadata
from areal_sc.transport.bulk.client import BulkClient
from areal_sc.transport.bulk.puller import Puller
from areal_sc.transport.rpc.transport import ZmqTransport
from areal_sc.transport.shards.store import TensorStore
from areal_sc.workers.calls import ReadTexts, RowText
from areal_sc.workers.row_texts import RowTexts
from areal_sc.workflows.trajectory import Trajectory

ROWS = [("12=", "3$"), ("ab", "c=d$"), ("x", "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy")]
FIELDS = {"input_ids": "int32", "loss_mask": "bool"}


@pytest.fixture
def tokenizer(tiny_model_folder: Path) -> Any:
    return load_tokenizer(tiny_model_folder)


@pytest.fixture
async def plane() -> Any:
    store = TensorStore("rollout/0", "life", max_bytes=1 << 20)
    puller = Puller(BulkClient(ZmqTransport(), "rollout/0"), local_store=store)
    yield SimpleNamespace(store=store, puller=puller)
    await puller.close()


def seal(plane: Any, tokenizer: Any, rows: Sequence[tuple[str, str]] = ROWS) -> BatchMetadata:
    parts = [[tokenizer.encode(text) for text in row] for row in rows]
    lengths = [len(prompt) + len(answer) for prompt, answer in parts]
    ids = [token for row in parts for part in row for token in part]
    mask = [i > 0 for row in parts for i, part in enumerate(row) for _ in part]
    fields = {"input_ids": torch.tensor(ids, dtype=torch.int32), "loss_mask": torch.tensor(mask)}
    runs = (RowRun(0, 0, len(rows)),)
    shard = ShardMetadata("rollout/0", "", plane.store.put(fields, lengths), runs)
    metadata = tuple(
        RowMetadata(0, 0, length, 1.0, 0, ((0, length),), i) for i, length in enumerate(lengths)
    )
    return BatchMetadata("b", 0, (Columns(dict(FIELDS), (shard,)),), metadata)


def row(**told: Any) -> Trajectory:
    return Trajectory([], [], [], [], [], 0.0, **told)


async def test_chosen_rows_are_read_with_what_is_told_of_them(plane: Any, tokenizer: Any) -> None:
    texts, batch = RowTexts(plane), seal(plane, tokenizer)
    outputs = ("", "it looked it up", "")
    rows = [row(metrics={"accuracy": i}, output=it) for i, it in enumerate(outputs)]
    texts.keep(batch.shards[0].shard_id, rows)
    found = await texts.read(ReadTexts(batch.take([1, 0]), 2000), tokenizer)
    first, second = (
        RowText("ab", "c=d$", {"accuracy": 1.0}, "it looked it up"),
        RowText("12=", "3$", {"accuracy": 0.0}),
    )
    assert found == (first, second)


async def test_a_long_text_is_cut(plane: Any, tokenizer: Any) -> None:
    batch = seal(plane, tokenizer)
    (found,) = await RowTexts(plane).read(ReadTexts(batch.take([2]), 20), tokenizer)
    assert found == RowText("x", "yyyyyyyyyy [... 20 characters ...] yyyyyyyyyy", {})


async def test_swept_rows_are_gone_and_nothing_is_kept_of_them(plane: Any, tokenizer: Any) -> None:
    texts, batch, kept = RowTexts(plane), seal(plane, tokenizer), seal(plane, tokenizer)
    for of in (batch, kept):
        texts.keep(of.shards[0].shard_id, [row()] * 3)
    plane.store.sweep(live=[2], acknowledged=2)
    texts.forget()
    assert list(texts._told) == [kept.shards[0].shard_id]
    with pytest.raises(ShardGone):
        await texts.read(ReadTexts(batch, 20), tokenizer)
