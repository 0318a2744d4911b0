"""The task of the first run with a pretrained model."""

from __future__ import annotations

import pytest
from sums import NUM_HELD_OUT, number, right, sums


def test_rows_are_all_sums_once_in_one_order() -> None:
    rows = sums()
    questions = [row["prompt"][1]["content"] for row in rows]
    assert len(set(questions)) == len(rows) == 2 * 48 * 48
    assert rows == sums()
    held_out = rows[:NUM_HELD_OUT]
    assert len(held_out) == 256
    for sign in "+-":  # both are among the held-out ones
        assert any(f" {sign} " in row["prompt"][2]["content"] for row in held_out)


def test_an_answer_is_that_of_the_question() -> None:
    for row in sums():
        _, question, begun = (message["content"] for message in row["prompt"])
        first, sign, second = question.removeprefix("What is ").removesuffix("?").split()
        value = int(first) + int(second) * (1 if sign == "+" else -1)
        assert (row["answer"], begun) == (str(value), f"{first} {sign} {second} =")


@pytest.mark.parametrize(
    ("completion", "is_right", "is_number"),
    [
        (" -22", 1, 1),
        ("-22\n", 1, 1),
        (" 22", 0, 1),
        (" - 22", 0, 0),
        (" -22.", 0, 0),
        (" -22 or -23", 0, 0),
        ("", 0, 0),
    ],
)
def test_the_whole_answer_counts(completion: str, is_right: int, is_number: int) -> None:
    assert right({"answer": "-22"}, completion) == is_right
    assert number({"answer": "-22"}, completion) == is_number
