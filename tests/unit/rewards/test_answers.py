from __future__ import annotations

import math
from typing import Any

import pytest

from areal_sc.errors import WorkflowError
from areal_sc.rewards.answers import ExactMatch, MultipleChoice, WordF1, normalized_words
from areal_sc.workflows.math_reward import exact_match, numeric_match
from areal_sc.workflows.single_turn import SingleTurnWorkflow


def test_words_are_compared_without_case_punctuation_and_articles() -> None:
    assert normalized_words("The  Cat's (a) mat. ") == "cats mat"


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("Paris", "paris.", 1.0),
        (["Paris", "the city of Paris"], "City of Paris", 1.0),
        ("Paris", "It is Paris", 0.0),
        (["The", "Paris"], "Paris", 1.0),
        (["The", "Paris"], "the", 0.0),  # nothing is left of the first one
    ],
)
def test_exact_match(answer: object, completion: str, reward: float) -> None:
    assert ExactMatch()({"answer": answer}, completion) == reward


def test_the_last_tag_holds_the_answer() -> None:
    match = ExactMatch(tag="answer")
    row = {"answer": "Paris"}
    assert match(row, "<answer>Rome</answer> no, <answer> Paris </answer>") == 1.0
    assert match(row, "<answer>Paris</answer> no, <answer>Rome</answer>") == 0.0
    assert match(row, "Paris") == 0.0
    assert WordF1(tag="answer")(row, "Paris") == 0.0


def test_a_part_is_made_of_whole_words() -> None:
    match = ExactMatch(is_part=True)
    assert match({"answer": "cat"}, "It is the cat there") == 1.0
    assert match({"answer": "cat"}, "concatenate") == 0.0


@pytest.mark.parametrize(
    ("answer", "completion", "reward"),
    [
        ("the cat sat", "A cat sat down", 2 * 2 / (2 + 3)),
        ("cat cat dog", "cat dog dog", 2 * 2 / (3 + 3)),  # each word as often as it stands in both
        (["dog", "cat"], "cat", 1.0),
        ("yes", "yes it is", 0.0),
        ("yes of course", "yes", 0.0),
        ("cat", "dog", 0.0),
        ("cat", "", 0.0),
    ],
)
def test_f1_of_words(answer: object, completion: str, reward: float) -> None:
    assert WordF1()({"answer": answer}, completion) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("The answer is (B).", "B"),
        ("**Answer: C**", "C"),
        ("The correct answer is: **C) 5 apples**", "C"),
        (r"so \boxed{\text{D}}", "D"),
        ("Answer: A. Wait: \\boxed{B}", "B"),  # a box is the stronger sign
        ("The answer is A. No, the answer is C.", "C"),
        ("<think>A</think><answer> B </answer>", "B"),
        ("First A, then B.\nD", "D"),
        ("B", "B"),
        ("A or B", None),
        ("The answer is B or C", None),
        ("Answer: **A** and (B)", None),
        ("Answer: A, B", None),
        ("<answer>A/B</answer>", None),
        ("<answer>A or E</answer>", "A"),  # there are four
        (r"\boxed{A, B}", None),
        (r"\boxed{\text{A or B}}", None),
        (r"\boxed{A} or \boxed{B}", None),
        (r"\boxed{A} or \boxed{A}", "A"),
        ("\\boxed{A}\nNo, I was wrong: it is \\boxed{B}", "B"),
        ("The answer is B, as A is wrong", "B"),
        ("<think>The answer is B.</think> I do not know.", None),
        ("The answer is B.</think> The answer is C.", "C"),
        ("The answer is C. <think>Is it? The answer is B", "C"),
        ("The answer is Berlin", None),
        ("The answer is E", None),  # there are four
        ("A man walks", None),
        ("", None),
    ],
)
def test_the_letter_that_is_chosen(completion: str, letter: str | None) -> None:
    choice = MultipleChoice()
    assert choice.chosen(completion) == letter
    for answer in "ABCD":
        assert choice({"answer": answer}, completion) == float(answer == letter)


def test_a_reference_may_stand_in_brackets_and_be_small() -> None:
    assert MultipleChoice()({"answer": " (b)"}, "B") == 1.0


@pytest.mark.parametrize("answer", ["A", "The", "+", "!", "", None, math.nan, 1, [], [2], ["a"]])
@pytest.mark.parametrize("reward", [ExactMatch(), ExactMatch(tag="answer"), WordF1()])
def test_a_reference_that_an_empty_answer_would_match_is_refused(
    reward: Any, answer: object
) -> None:
    for completion in ("", "the", "???", "<answer></answer>"):
        with pytest.raises(ValueError, match="answer"):
            reward({"answer": answer}, completion)
    with pytest.raises(WorkflowError, match="answer"):
        SingleTurnWorkflow(reward).check_row({"prompt": "p", "answer": answer})


@pytest.mark.parametrize(
    ("reward", "answer"),
    [
        (ExactMatch(), "Paris"),
        (WordF1(), "Paris"),
        (MultipleChoice(), "B"),
        (numeric_match, "5"),
        (exact_match, 5),
    ],
)
def test_rows_are_looked_at_before_the_run(reward: Any, answer: object) -> None:
    workflow = SingleTurnWorkflow({"right": reward})
    workflow.check_row({"prompt": "p", "answer": answer})
    for row in ({"answer": None}, {"answer": math.nan}, {}):
        with pytest.raises(WorkflowError, match="answer"):
            workflow.check_row({"prompt": "p", **row})


@pytest.mark.parametrize(
    ("reward", "completion", "expected"),
    [
        (ExactMatch(), "<think>hm</think>Paris", 1.0),
        (ExactMatch(), "Rome?</think>\n\nParis", 1.0),  # the prompt has opened it
        (ExactMatch(is_part=True), "<think>Is it Paris? No.</think> Rome", 0.0),
        (ExactMatch(tag="answer"), "<think><answer>Paris</answer></think> I do not know", 0.0),
        (ExactMatch(tag="answer"), "<answer>Paris</answer> or <answer>Rome</answer>", 0.0),
        (ExactMatch(tag="answer"), "<answer>Rome</answer> or <answer>Paris</answer>", 0.0),
        (WordF1(), "<think>France, Europe</think>Paris", 1.0),
        (exact_match, "<think>hm</think> Paris\n", 1.0),
        (numeric_match, "<think>hm</think> Paris\n", 1.0),
        (numeric_match, "<think>Paris", 0.0),
    ],
)
def test_reasoning_is_no_answer_for_any_reward(
    reward: Any, completion: str, expected: float
) -> None:
    assert reward({"answer": "Paris"}, completion) == expected


@pytest.mark.parametrize("answer", ["E", "AB", "", None, 1, [], [2]])
def test_a_reference_that_is_no_choice_is_refused(answer: object) -> None:
    with pytest.raises(ValueError, match="answer"):
        MultipleChoice()({"answer": answer}, "A")


def test_the_number_of_choices_is_bounded() -> None:
    assert MultipleChoice(10).chosen("The answer is J") == "J"
    with pytest.raises(ValueError, match="choices=1"):
        MultipleChoice(1)


def test_votes_are_what_equal_answers_share() -> None:
    words, choice = ExactMatch(tag="answer"), MultipleChoice()
    assert words.vote("so <answer>The Nile.</answer>") == words.vote("<answer>nile</answer>")
    assert words.vote("the Nile") is None
    assert ExactMatch().vote("...") is None
    assert choice.vote("The answer is (B).") == "B"


CITIES = ["Paris", "The Hague", "Paris, Texas", "Oslo"]


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("The answer is Paris.", "A"),
        ("The answer is (B) Paris", "B"),  # a letter is stronger
        ("<answer>paris texas</answer>", "C"),
        (r"So \boxed{\text{Hague}}", "B"),
        ("It could be Paris.\nOslo", "D"),
        ("<think>Paris</think>\nOslo", "D"),
        ("So:\n(B) The Hague", "B"),
        ("**D. Oslo**", "D"),
        ("A) Oslo", None),
        ("The answer is Rome.", None),
        ("It is Paris or Oslo", None),
        ("", None),
    ],
)
def test_a_choice_may_be_named_by_its_text(completion: str, chosen: str | None) -> None:
    choice = MultipleChoice(texts="choices")
    for letter in "ABCD":
        row = {"answer": letter, "choices": CITIES}
        assert choice(row, completion) == float(letter == chosen)


@pytest.mark.parametrize(
    ("completion", "chosen"),
    [
        ("The answer is -5.", "A"),
        (r"\boxed{5}", "B"),
        ("B. 5", "B"),
        ("B. -5", None),
        ("So **1.5**", None),
        ("**1.5**.", "C"),
        ("15", None),
        (r"\boxed{x+1}", None),
        (r"\boxed{x - 1}", "D"),
        (r"\boxed{\frac{1}{4}}", "E"),
        (r"\boxed{\frac{1}{3}}", None),
        (".5", None),
        (r"\boxed{\text{None of them}}", "F"),
    ],
)
def test_numbers_and_formulas_are_compared_as_they_are(completion: str, chosen: str | None) -> None:
    choice = MultipleChoice(6, texts="choices")
    texts = ["-5", "5", "1.5", "x - 1", r"$\frac{1}{4}$", "none of them"]
    for letter in "ABCDEF":
        row = {"answer": letter, "choices": texts}
        assert choice(row, completion) == float(letter == chosen)


def test_texts_of_choices_are_checked() -> None:
    choice = MultipleChoice(texts="choices")
    with pytest.raises(ValueError, match="column 'choices': expected a list"):
        choice({"answer": "A"}, "Paris")
    twice = {"answer": "A", "choices": ["Oslo", "Oslo"]}
    assert choice(twice, "Oslo") == 0.0
