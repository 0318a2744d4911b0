from __future__ import annotations

import pytest

from areal_sc.rewards.shape import RepetitionPenalty, TagFormat

BOTH = ["think", "answer"]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think>\n<answer>x</answer>\n", 1.0),
        ("  <think></think><answer></answer>", 1.0),
        ("<think>a<b></think><answer>x</answer>", 1.0),
        ("<think><think>a</think><answer>x</answer>", 0.0),
        ("<think>a</think><answer>x</answer><answer>y</answer>", 0.0),
        ("<answer>x</answer><think>a</think>", 0.0),
        ("so <think>a</think><answer>x</answer>", 0.0),
        ("<think>a</think><answer>x</answer> done", 0.0),
        ("<think>a</think>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_in_order_and_once(completion: str, reward: float) -> None:
    assert TagFormat(BOTH)({}, completion) == reward


def test_the_prompt_may_have_opened_the_first_tag_and_text_may_follow() -> None:
    opened = TagFormat(["think"], opened=True, is_free_behind=True)
    assert opened({}, "some\nthought</think> The answer is 5.") == 1.0
    assert opened({}, "<think>some thought</think> 5") == 0.0
    assert opened({}, "some thought</think> 5</think>") == 0.0


@pytest.mark.parametrize("tags", [[], ["a", "a"]])
def test_tags_are_checked(tags: list[str]) -> None:
    with pytest.raises(ValueError, match="tags"):
        TagFormat(tags)


@pytest.mark.parametrize(
    ("n", "completion", "reward"),
    [
        (2, "a b a b a b", -2.0 * (1 - 2 / 5)),
        (2, "A b\na B", -2.0 * (1 - 2 / 3)),
        (1, "a a a a", -2.0 * (1 - 1 / 4)),
        (3, "a b c d", 0.0),
        (3, "a b", 0.0),
        (3, "", 0.0),
    ],
)
def test_what_comes_again_costs(n: int, completion: str, reward: float) -> None:
    assert RepetitionPenalty(n, 2.0)({}, completion) == pytest.approx(reward)


@pytest.mark.parametrize(("n", "penalty"), [(0, 1.0), (2, 0.0), (2, float("nan"))])
def test_a_penalty_is_checked(n: int, penalty: float) -> None:
    with pytest.raises(ValueError, match="expected n >= 1 and penalty > 0"):
        RepetitionPenalty(n, penalty)
