"""References and completions, among them those in the formats of the field's data and models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonl_math
import pytest

from areal_sc.errors import ConfigError
from areal_sc.sources.reference import reference_of, resolve
from areal_sc.workflows.math_reward import (
    NumericMatch,
    check_answers,
    exact_match,
    numeric_match,
)

HOSTILE = [
    "{" * 100_000,
    r"\boxed{" * 15_000,
    r"\boxed{1} or " * 8_000,
    "$" * 100_000,
    r"\[ " * 30_000,
    "####" * 25_000,
    "####\n" * 20_000,
    "<answer>" * 12_000,
    "<think>" * 15_000,
    "the answer is " * 7_000,
    "the answer is not " * 6_000 + "6",
    " " * 100_000 + "x",
    "".join(map(chr, range(32))) * 3_000,
    "\ue000" * 100_000,
    "\\boxed{\u0666}",
    "\\boxed{6\x00}",
    "\\boxed{\ud800}",
    r"\boxed{9^{9^9}}",
    r"\boxed{9^{9^{9^{9^9}}}}",
    r"\boxed{((9!)!)!}",
    r"\boxed{1e99999999}",
    r"\boxed{" + r"\frac{1}{" * 100 + "6" + "}" * 100 + "}",
    r"\boxed{" + "(" * 400 + "7" + ")" * 400 + "}",
    r"\boxed{" + "1," * 499 + "1}",
    r"\boxed{" + r"\pm 1" * 150 + "}",
    r"\boxed{\frac{6}{0}}",
]


def rewards(name: str) -> dict[tuple[str, str], float]:
    """Of each line `reference ⇒ completion` of a file beside this one; ⏎ is the end of a line."""
    found = {}
    for line in Path(__file__).with_name(name).read_text().splitlines():
        answer, _, completion = line.replace("⏎", "\n").partition(" ⇒")
        completion = completion.removeprefix(" ")
        found[answer, completion] = numeric_match({"answer": answer}, completion)
    assert len(found) > 500
    return found


def test_right_answers_are_rewarded() -> None:
    assert [pair for pair, it in rewards("right_answers.txt").items() if it != 1.0] == []
    assert numeric_match({"answer": 1000}, "1,000") == 1.0


def test_no_wrong_answer_is_rewarded() -> None:
    assert [pair for pair, it in rewards("wrong_answers.txt").items() if it != 0.0] == []


@pytest.mark.parametrize(
    ("answer", "completion", "words"),
    [
        (
            "5",
            r"\boxed{@ 5}",
            "therefore thus hence so simply just exactly equals is are the an a number value "
            "answer result option choice approximately about roughly it be then",
        ),
        (
            "5",
            "So the answer is 5 @ he went home.",
            "so which when that if after but for at on is are was were has have every each "
            "altogether total left hence thus then instead rather remaining he she they we it",
        ),
        ("5", "So the answer is 5 @ 2 + 3 = 5.", "because since as where not"),
        ("5", "#### 5 @", "of in an each every for at altogether total the on"),
        ("x", r"\boxed{\@{x}}", "text mathrm textbf mathbf mbox operatorname rm textit"),
        (r"\@(x)", r"\boxed{@(x)}", "sin cos tan ln log exp"),
        (
            "x^2",
            r"\boxed{@ x^2}",
            r"\displaystyle \limits \left. \big \Big \bigr \Bigr \bigl \Bigl",
        ),
        ("1000", r"\boxed{1@000}", r"\, \; \: {,} {\,}"),
    ],
)
def test_words_around_an_answer_that_change_nothing(
    answer: str, completion: str, words: str
) -> None:
    for word in words.split():
        prompt = {"answer": answer.replace("@", word)}
        assert numeric_match(prompt, completion.replace("@", word)) == 1.0, word


@pytest.mark.parametrize(
    ("completion", "words"),
    [
        (
            r"\boxed{5 @}",
            "squared cubed factorial pairs pair half halves third quarter fourth fifth sixth "
            "eighth tenth hundredth thirds over plus minus times divided point and than out modulo "
            "mod base or",
        ),
        (
            "We see that it is @ 5.",
            "not than least most between from no never except times plus minus by over nor exceeds "
            "below above under before after within without almost nearly twice double mod step "
            "question equation up#to instead#of anything#but not#quite#exactly",
        ),
        (
            "We have the @ of 5.",
            "% 3 percent out half third thirds quarter quarters multiple power root roots square "
            "cube factor factors divisor divisors minimum maximum",
        ),
        (
            "We see that 5 @.",
            "cannot can't isn't wasn't doesn't didn't wouldn't couldn't is#wrong is#incorrect "
            "is#impossible is#invalid is#false was#wrong seems#wrong looks#wrong is#not#right",
        ),
    ],
)
def test_words_around_an_answer_that_make_it_another(completion: str, words: str) -> None:
    for word in words.split():
        said = word.replace("#", " ")
        assert numeric_match({"answer": "5"}, completion.replace("@", said)) == 0.0, said


@pytest.mark.parametrize("completion", HOSTILE)
def test_a_hostile_completion_is_wrong_and_soon_read(completion: str) -> None:
    for answer in ("6", r"\sqrt{3}", "Monday"):
        assert numeric_match({"answer": answer}, completion) == 0.0


def test_golds_that_look_like_articles_can_be_read() -> None:
    check_answers([{"answer": answer} for answer in ("a^2 - b^2", "a/b", r"A \cup B", "a + b")])


def test_the_reading_of_math_verify_is_a_call_of_the_library() -> None:
    """Its verdicts are its own, also where the strict reading differs."""
    by_library = resolve(reference_of(NumericMatch("math_verify")))  # as in a reward process
    assert by_library({"answer": "1/2"}, "The answer is $0.5$.") == 1.0
    assert by_library({"answer": "1/2"}, "The answer is $0.6$.") == 0.0
    assert by_library({"answer": "$\\sqrt{"}, "1") == 0.0
    lenient = {"answer": "5"}, "The answer is not 5."
    assert (by_library(*lenient), numeric_match(*lenient)) == (1.0, 0.0)
    with pytest.raises(ValueError, match="lenient"):
        NumericMatch("lenient")


def test_reference_answers_that_cannot_be_read_are_named() -> None:
    good = [
        {"answer": answer} for answer in ("3", r"\sqrt{2}", "(1, 2)", "Monday", "... #### 5", 7)
    ]
    check_answers(good)
    bad = [r"\frac{1}{", "x = = 3", "", "5 apples, maybe 6", "5!7?"]
    rows = [*good, *({"answer": answer} for answer in bad), {"question": "?"}]
    with pytest.raises(ConfigError) as caught:
        check_answers(rows)
    message = str(caught.value)
    assert message.startswith("6 reference answers cannot be read:")
    for index, answer in enumerate(bad, start=len(good)):
        assert f"row {index}: the reference answer {answer!r} cannot be parsed" in message
    assert "and 1 more" in message
    with pytest.raises(ConfigError, match="row 0: the row has no 'answer', only \\['question'\\]"):
        check_answers([{"question": "?"}])
    with pytest.raises(ValueError, match="the reference answer '' cannot be parsed"):
        numeric_match({"answer": ""}, "3")


def test_the_example_names_them_before_it_starts(tmp_path: Path) -> None:
    config = Path(jsonl_math.__file__).parents[1] / "configs" / "jsonl_math.yaml"
    dataset = tmp_path / "rows.jsonl"
    answers = ["1", "2", "3 = = 4"]
    dataset.write_text("".join(json.dumps({"prompt": "?", "answer": a}) + "\n" for a in answers))
    settings = [f"run_dir={tmp_path / 'run'}", f"task.dataset={dataset}", "task.num_held_out=1"]
    with pytest.raises(ConfigError, match="row 2: the reference answer '3 = = 4'"):
        jsonl_math.main(["--config", str(config), "actor.path=/none", *settings])
    assert not (tmp_path / "run").exists()


def test_plain_numbers_are_compared_without_sympy() -> None:
    """So the script, which only names the reward and reads references, stays light."""
    program = (
        "import sys\n"
        "from areal_sc.workflows.math_reward import check_answers, numeric_match\n"
        "check_answers([{'answer': '1,234.5'}, {'answer': '-3/4'}, {'answer': 'Monday'}])\n"
        "assert numeric_match({'answer': '5'}, 'The answer is 5 apples.') == 1.0\n"
        "assert not {'sympy', 'math_verify', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_exact_match_ignores_only_white_space_around() -> None:
    assert exact_match({"answer": "a b"}, " a b\n") == 1.0
    assert exact_match({"answer": "a b"}, "ab") == 0.0


@pytest.mark.parametrize("reward", [exact_match, numeric_match])
def test_a_missing_reference_answer_is_no_word(reward: Any) -> None:
    with pytest.raises(ValueError, match="missing"):
        reward({"answer": None}, "None")
    with pytest.raises(ConfigError, match=r"row 0: .* is missing \(null\)"):
        check_answers([{"answer": None}])
