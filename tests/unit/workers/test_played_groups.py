"""Rows of datasets as text: short ones as they are, of long ones no more than is kept."""

from __future__ import annotations

import tracemalloc

import pytest

from areal_sc.workers.played_groups import MAX_PROMPT_CHARS, row_text


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "12 + 7 =\n'", "answer": 19, "tests": [["a", None], [1.5, True]], "none": []},
        {"image": b"\0\xff", "pair": (1, {}), 3: {"deep": ()}},
        "a row of some class",
        {},
    ],
)
def test_a_short_row_is_as_str_has_it(row: object) -> None:
    assert row_text(row) == (repr(row) if isinstance(row, str) else str(row))


@pytest.mark.parametrize(
    "long",
    ["word\n" * 2_000_000, b"\0" * 10_000_000, [1] * 1_000_000, {"of": ["many\n" * 999] * 99_999}],
    ids=["text", "bytes", "numbers", "texts"],
)
def test_of_a_long_row_no_more_is_made_than_is_kept(long: object) -> None:
    row = {"prompt": long, "answer": "19"}
    tracemalloc.start()
    text = row_text(row)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 100_000
    assert len(text) < MAX_PROMPT_CHARS + 10
    assert text.startswith("{'prompt': ")
    is_whole = isinstance(long, str | bytes)  # each is cut by itself
    assert text.endswith("'19'}" if is_whole else " [...]")
