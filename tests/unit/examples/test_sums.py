"""The task of the first run with a pretrained model."""

from __future__ import annotations

from sums import NUM_HELD_OUT, sums


def test_rows_are_all_sums_once_in_one_order() -> None:
    rows = sums()
    assert len({row["prompt"] for row in rows}) == len(rows) == 2 * 48 * 48
    assert rows == sums()
    held_out = rows[:NUM_HELD_OUT]
    assert len(held_out) == 256
    for sign in "+-":  # both are among the held-out ones
        assert any(f" {sign} " in row["prompt"] for row in held_out)


def test_an_answer_is_that_of_the_question() -> None:
    for row in sums():
        question = row["prompt"].removesuffix("? Reply with the number only.")
        first, sign, second = question.removeprefix("What is ").split()
        value = int(first) + int(second) * (1 if sign == "+" else -1)
        assert row["answer"] == str(value)
