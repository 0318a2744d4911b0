"""The verifiers of reasoning-gym as a reward, and answers that would be run as Python."""

from __future__ import annotations

import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from areal_sc import load_prompts
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import voter_of
from areal_sc.rewards.reasoning_gym import (
    FORMULAS,
    LISTS,
    ReasoningGymReward,
    reasoning_gym_reward,
)
from areal_sc.sources.reference import ObjectReference, reference_of, resolve

TASKS = ["chain_sum", "leg_counting", "time_intervals", "countdown", "binary_matrix"]

Rows = Mapping[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def rows() -> Rows:
    """Some rows of each of these tasks, by name."""
    names = sorted({*TASKS, *LISTS, *FORMULAS, "prime_factorization"})
    paths = [f"reasoning_gym:{name}" for name in names]
    made = load_prompts(paths, size=8 * len(names), seed=5)
    return {name: [row for row in made if row["reasoning_gym"]["task"] == name] for name in names}


@pytest.mark.parametrize("task", TASKS)
def test_solutions_get_one_and_other_answers_less(task: str, rows: Rows) -> None:
    assert len(rows[task]) == 8
    for row in rows[task]:
        assert reasoning_gym_reward(row, row["answer"]) == 1.0
        assert reasoning_gym_reward(row, f"<think>Or 0?</think>\n{row['answer']}\n") == 1.0
        for other in ("", "I do not know.", "-1", f"<think>{row['answer']}</think>"):
            assert 0.0 <= reasoning_gym_reward(row, other) < 1.0, (row, other)


def test_an_answer_in_a_tag(rows: Rows) -> None:
    row = rows["chain_sum"][0]
    reward = resolve(
        ObjectReference.from_wire(reference_of(ReasoningGymReward(tag="answer")).to_wire())
    )
    assert reward(row, f"It is <answer>\n{row['answer']}</answer>.") == 1.0
    assert reward(row, row["answer"]) == 0.0
    assert voter_of(reward) is reward
    assert reward.vote("<answer> 7 </answer>") == "7"
    assert reward.vote("7") is None


def test_settings_reach_the_verifier(rows: Rows) -> None:
    row = next(
        row for row in rows["puzzle24"] if max(row["reasoning_gym"]["metadata"]["numbers"]) > 2
    )
    assert reasoning_gym_reward(row, row["answer"]) == 1.0
    narrow = {**row["reasoning_gym"], "settings": {"max_value": 2}}
    assert reasoning_gym_reward({**row, "reasoning_gym": narrow}, row["answer"]) < 1.0


def test_an_answer_over_which_the_verifier_raises_is_wrong(rows: Rows) -> None:
    row = rows["prime_factorization"][0]
    entry = {**row, "metadata": row["reasoning_gym"]["metadata"]}
    with pytest.raises(ValueError, match="invalid literal"):
        reasoning_gym.create_dataset("prime_factorization").score_answer("abc", entry)
    assert reasoning_gym_reward(row, "abc") == 0.0


def test_a_row_of_another_source_is_refused() -> None:
    row = {"prompt": "1 + 1", "answer": "2"}
    with pytest.raises(WorkflowError, match=r"no column 'question'.*load_prompts\(\"reasoning_gym"):
        reasoning_gym_reward.check_row(row)
    with pytest.raises(ValueError, match="no column 'question'"):
        reasoning_gym_reward(row, "2")


def as_list(row: dict[str, Any]) -> str:
    """The right answer as a list of Python, for which the library gives a part of 1.0."""
    answer = row["answer"]
    lines = [line.split() for line in answer.splitlines()]
    task = row["reasoning_gym"]["task"]
    if task == "binary_matrix":
        return str([[int(cell) for cell in line] for line in lines])
    if task == "spiral_matrix":
        return str([int(cell) for cell in answer.split()])
    return str(lines if task == "n_queens" else list(answer))


@pytest.mark.parametrize("task", sorted(LISTS | FORMULAS))
def test_no_answer_is_run_as_python(task: str, rows: Rows, tmp_path: Path) -> None:
    row = rows[task][0]
    trace = tmp_path / "was_run"
    code = f"open({str(trace)!r}, 'w')"
    plain = "exec(" + " + ".join(f"chr({ord(it)})" for it in code) + ")"
    for attack in (f"[{code}]", code, plain, f"[{plain}]", f"({plain}) . real", f"1 + {plain}"):
        assert reasoning_gym_reward(row, attack) < 0.1, attack
        assert not trace.exists(), attack
    if task in LISTS:
        assert 0 < reasoning_gym_reward(row, as_list(row)) < 1, "lists are read all the same"


@pytest.mark.parametrize(
    ("task", "answer"),
    [
        ("countdown", "({sum})*0j - {target}j*1j"),
        ("countdown", "({sum})*(x-x) - {target}j*1j"),
        ("puzzle24", "4*6*1*1"),
        ("coin_flip", "0"),
        ("coin_flip", "0.0"),
        ("complex_arithmetic", "nan"),
        ("complex_arithmetic", "nan+nanj"),
        ("game_of_life_halting", "I do not know"),
    ],
)
def test_what_fools_a_verifier_is_wrong(task: str, answer: str) -> None:
    for row in load_prompts(f"reasoning_gym:{task}", size=8, seed=3):
        metadata = row["reasoning_gym"]["metadata"]
        total = "+".join(map(str, metadata.get("numbers", [])))
        given = answer.format(sum=total, target=metadata.get("target"))
        is_right = (
            sorted(metadata["numbers"]) == [1, 1, 4, 6]
            if task == "puzzle24"
            else task == "coin_flip" and float(row["answer"]) < 1e-4  # as near as it has to be
        )
        assert is_right or reasoning_gym_reward(row, given) == 0.0
        assert reasoning_gym_reward(row, row["answer"]) == 1.0


def test_an_answer_that_would_take_all_memory_gets_next_to_nothing() -> None:
    (row,) = load_prompts("reasoning_gym:rubiks_cube", size=1, seed=1)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    assert reasoning_gym_reward(row, "R2000000000") < 0.1
    assert resource.getrlimit(resource.RLIMIT_AS) == limit


@pytest.mark.parametrize("task", sorted(FORMULAS))
def test_formulas_are_read(task: str, rows: Rows) -> None:
    for row in rows[task]:
        assert reasoning_gym_reward(row, row["answer"]) == 1.0
        assert reasoning_gym_reward(row, f"({row['answer']})") == 1.0


def test_no_other_verifier_runs_answers() -> None:
    """A version of the library with another one has to be looked at."""
    runs = re.compile(r"\b(?:eval|exec|parse_expr|sympify|literal_eval|parse_latex)\(")
    harmless = {
        "bitwise_arithmetic": "its problem",
        "basic_arithmetic": "its problem",
        "codeio": "its program",
        "gsm_symbolic": "its numbers",
        "number_sorting": "its answer",
        "propositional_logic": "a parser of its own",
    }
    found = set()
    for task, (kind, _) in DATASETS.items():
        module = Path(reasoning_gym.__file__).parent.joinpath(*kind.__module__.split(".")[1:])
        if runs.search(module.with_suffix(".py").read_text()):
            found.add(task)
    assert found - harmless.keys() == LISTS | FORMULAS
