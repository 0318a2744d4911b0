"""Datasets and the order of their prompts."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from areal_sc.errors import WorkflowError
from areal_sc.sources.prompts import JsonlPrompts, prompt_at, write_prompts
from areal_sc.sources.reference import reference_of, resolve


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 64, 100, 1000])
def test_every_epoch_takes_every_prompt_once(length: int) -> None:
    for epoch in range(3):
        taken = [prompt_at(epoch * length + i, length, seed=5) for i in range(length)]
        assert sorted(taken) == list(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {
        tuple(prompt_at(epoch * 50 + i, 50, seed) for i in range(50))
        for epoch in range(4)
        for seed in range(4)
    }
    assert len(orders) == 16


def test_the_order_is_fixed_for_runs_that_resume() -> None:
    assert [prompt_at(i, 10, seed=0) for i in range(10)] == [9, 5, 2, 4, 0, 1, 8, 6, 3, 7]


def test_all_orders_of_few_prompts_are_about_equally_likely() -> None:
    """24 orders of 4 prompts over 4,800 seeds: 200 each; a chi-square of 23 degrees."""
    counts = Counter(tuple(prompt_at(i, 4, seed) for i in range(4)) for seed in range(4800))
    chi_square = sum((counts[order] - 200) ** 2 / 200 for order in counts)
    assert len(counts) == 24
    assert chi_square < 60  # the value that chance exceeds once in 30,000


def test_a_huge_dataset_needs_no_table() -> None:
    taken = {prompt_at(i, 1 << 31, seed=1) for i in range(2000)}
    assert len(taken) == 2000
    assert max(taken) > 1 << 30


@pytest.mark.parametrize(("position", "length"), [(-1, 3), (0, 0)])
def test_impossible_positions_are_refused(position: int, length: int) -> None:
    with pytest.raises(ValueError, match=f"got {position} and {length}"):
        prompt_at(position, length, seed=0)


def test_rows_keep_their_keys_and_text(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a\u2028b", "answer": "ä"},
        {"prompt": "\ud83d", "n": 3, "nested": {"x": [1, None]}},
        {"span": (1, 2), "scores": {2: 7.0}, "value": 2**70, "$": np.float32(0.1)},
    ]
    prompts = write_prompts(rows, tmp_path)
    assert [prompts[i] for i in range(len(prompts))] == rows
    assert type(prompts[2]["$"]) is np.float32


def test_a_row_given_out_can_be_changed(tmp_path: Path) -> None:
    prompts = write_prompts([{"prompt": "x", "more": [1]}], tmp_path)
    row = prompts[0]
    row["prompt"] = "changed"
    row["more"].append(2)
    assert prompts[0] == {"prompt": "x", "more": [1]}


def test_a_relative_path_is_referenced_absolutely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n\n')
    monkeypatch.chdir(tmp_path)
    reference = reference_of(JsonlPrompts("rows.jsonl"))
    monkeypatch.chdir(os.sep)
    assert resolve(reference)[0] == {"prompt": "x"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty dataset: .* has no row"),
        ("\n\n", "empty dataset"),
        ('{"prompt": "x"}\n{"prompt": \n', "rows.jsonl:2: no JSON"),
        ('{"prompt": "x"}\n\n["x"]\n', r"rows.jsonl:3: expected a JSON object .* got '\[\"x\"\]'"),
    ],
)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(WorkflowError, match=message):
        JsonlPrompts(tmp_path / "rows.jsonl")


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match="does not exist"):
        JsonlPrompts(tmp_path / "none.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(WorkflowError, match="cannot be read"):
        JsonlPrompts(tmp_path / "binary.jsonl")


@pytest.mark.parametrize("row", ["y", {"prompt": object()}])
def test_a_list_that_cannot_be_written_is_refused(tmp_path: Path, row: Any) -> None:
    with pytest.raises(WorkflowError, match=r"row 1 of the dataset \(list\)"):
        write_prompts([{"prompt": "x"}, row], tmp_path)
    assert list(tmp_path.iterdir()) == []
