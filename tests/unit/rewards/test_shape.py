from __future__ import annotations

import math

import pytest

from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import DECLARATION
from areal_sc.rewards.shape import CodeBlockFormat, CosineLength, RepetitionPenalty, TagFormat
from areal_sc.sources.reference import reference_of, resolve
from areal_sc.workflows.math_reward import exact_match, numeric_match

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


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>x</answer>", 1.0),
        ("<answer>x</answer><think>a</think>", 0.5),  # all marks, in another order
        ("<think>a</think> x", 0.25),
        ("<think>a<think></think><answer>", 0.25),
        ("x", 0.0),
    ],
)
def test_a_part_of_the_format_may_count(completion: str, reward: float) -> None:
    assert TagFormat(BOTH, part_credit=0.5)({}, completion) == reward
    with pytest.raises(ValueError, match="part_credit"):
        TagFormat(BOTH, part_credit=1.0)


def test_the_first_mark_may_be_the_prompts() -> None:
    assert TagFormat(["think"], opened=True, part_credit=0.5)({}, "so</think> x") == 0.5


@pytest.mark.parametrize(
    ("completion", "any_code", "python"),
    [
        ("So:\n```python\nx = 1\n```", 1.0, 1.0),
        ("```\nx = 1\n```\n", 1.0, 0.0),
        ("```python\nx = 1\n", 0.0, 0.0),
        ("<think>```python\nx = 1\n```</think> None.", 0.0, 0.0),
        ("x = 1", 0.0, 0.0),
    ],
)
def test_a_block_of_code_is_a_format(completion: str, any_code: float, python: float) -> None:
    assert CodeBlockFormat()({}, completion) == any_code
    assert CodeBlockFormat(["python", "py"])({}, completion) == python


@pytest.mark.parametrize("size", [1, 30, 100, 200])
@pytest.mark.parametrize("is_right", [True, False])
def test_length_moves_a_reward_along_a_cosine(size: int, is_right: bool) -> None:
    ends = {"right": (2.0, 1.0), "wrong": (-10.0, 0.0)}
    reward = CosineLength(exact_match, max_chars=200, too_long=-10.0, **ends)
    answer = "x" * size
    found = reward({"answer": answer if is_right else "y"}, answer)
    start, end = ends["right" if is_right else "wrong"]
    # the paper: CosFn(t, T, least, most) = least + (most - least) (1 + cos(t pi / T)) / 2
    assert found == pytest.approx(end + (start - end) * (1 + math.cos(size * math.pi / 200)) / 2)
    assert reward({"answer": "x" * 201}, "x" * 201) == -10.0


def test_a_reward_in_another_one_keeps_what_it_says_of_itself() -> None:
    reward = CosineLength(numeric_match, max_chars=100)
    again = resolve(reference_of(reward))
    for it in (reward, again):
        assert getattr(it, DECLARATION) == getattr(numeric_match, DECLARATION)
        assert it({"answer": "4"}, "4") == pytest.approx(1.0, abs=0.01)
    with pytest.raises(WorkflowError):
        reward.check_row({})

    async def judged(prompt: dict[str, str], completion: str) -> float:
        return 1.0

    with pytest.raises(ValueError, match="not async"):
        CosineLength(judged, max_chars=100)
    with pytest.raises(ValueError, match="max_chars=0"):
        CosineLength(exact_match, max_chars=0)


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
