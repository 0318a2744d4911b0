from __future__ import annotations

import pytest

from areal_sc.workflows.math_reward import exact_match, final_number, numeric_match


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42.0),
        ("The answer is 42.", 42.0),
        ("First 3, then 4", 4.0),
        ("it costs $1,234,567.50 in all", 1234567.5),
        ("1,2", 2.0),  # a list, no thousands
        ("-7", -7.0),
        ("\N{MINUS SIGN}7", -7.0),
        ("10-7", 7.0),
        ("x = -7", -7.0),
        ("3/4", 0.75),
        ("-3 / 4", -0.75),
        (r"\frac{3}{4}", 0.75),
        (r"so x is -\dfrac{3}{4}.", -0.75),
        ("2e-3", 0.002),
        (".5", 0.5),
        ("50%", 50.0),
        ("so 3 + 4 = 7\n#### 8 apples, not 9", 8.0),
        (r"\boxed{5} and later 6", 5.0),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", 0.5),
        (r"\boxed{12", 12.0),
        ("none at all", None),
        ("#### none", None),
        ("", None),
        ("1e999999999", float("inf")),
    ],
)
def test_the_final_number_is_found(text: str, number: float | None) -> None:
    assert final_number(text) == number


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("0.333333333", "1/3", 1.0),
        ("1000", "1,000.0", 1.0),
        (1000, "1,000", 1.0),
        ("... #### 18", "she makes $18 every day", 1.0),
        ("100", "100.1", 0.0),
        ("0", "0.0", 1.0),
        ("5", "1/0", 0.0),
        ("5", "1e999999999", 0.0),
        ("5", "I do not know", 0.0),
    ],
)
def test_numbers_are_compared_by_value(answer: str | int, completion: str, reward: float) -> None:
    assert numeric_match({"answer": answer}, completion) == reward


def test_an_answer_without_a_number_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="'many' has no number"):
        numeric_match({"answer": "many"}, "3")


def test_exact_match_ignores_only_white_space_around() -> None:
    assert exact_match({"answer": "a b"}, " a b\n") == 1.0
    assert exact_match({"answer": "a b"}, "ab") == 0.0
