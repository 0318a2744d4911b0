"""Generated tasks as rows: the same for the same seed, shares by weight, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from areal_sc import load_prompts
from areal_sc.errors import WorkflowError
from areal_sc.sources.prompts import write_prompts
from areal_sc.sources.reasoning_gym import library_task

SUMS = "reasoning_gym:chain_sum"
LEGS = "reasoning_gym:leg_counting"
BY_HASH = (
    *("isomorphic_strings", "knight_swap", "polynomial_multiplication"),
    *("ransom_note", "word_ladder"),
)
"""Tasks of the library whose rows depend on Python's hash seed."""

PRINT_ROWS = """
import json, random, sys
from areal_sc import load_prompts

random.seed(int(sys.argv[1]))
rows = load_prompts(json.loads(sys.argv[2]), size=7, seed=3)
print(json.dumps([[row["prompt"], row["answer"]] for row in rows]))
"""


def test_rows_hold_all_columns_and_arrive_as_they_are(tmp_path: Path) -> None:
    tasks = [SUMS, "reasoning_gym:calendar_arithmetic", "reasoning_gym:word_ladder"]
    rows = list(load_prompts(tasks, size=6, seed=1))
    names = [row["reasoning_gym"]["task"] for row in rows]
    assert Counter(names) == {"chain_sum": 2, "calendar_arithmetic": 2, "word_ladder": 2}
    assert all(row["prompt"] == row["question"] for row in rows)
    assert json.loads(json.dumps(rows)) != rows, "metadata hold more than JSON has"
    copied = write_prompts(rows, tmp_path)
    assert [copied[number] for number in range(6)] == rows


def test_the_same_seed_gives_the_same_rows_in_every_process() -> None:
    tasks = [f"reasoning_gym:{name}" for name in [*BY_HASH, "list_functions", "pool_matrix"]]
    found = {
        subprocess.run(
            [sys.executable, "-c", PRINT_ROWS, hash_seed, json.dumps(tasks)],
            env={
                **os.environ,
                "PYTHONHASHSEED": hash_seed,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    (printed,) = found
    assert len(json.loads(printed)) == 7


def test_tasks_alternate_by_their_weights_and_another_seed_gives_other_rows() -> None:
    """The library's own rows of seed 1 and seed 2 are the same but for one."""
    found = []
    for seed in (1, 2):
        rows = load_prompts(
            [SUMS, LEGS],
            weights=[2, 1],
            size=30,
            seed=seed,
            settings=[{"min_terms": 6}, {}],
            template="{question} Only that.",
        )
        names = [row["reasoning_gym"]["task"] for row in rows]
        assert Counter(names) == {"chain_sum": 20, "leg_counting": 10}
        assert Counter(names[:6]) == {"chain_sum": 4, "leg_counting": 2}
        assert all(row["prompt"] == f"{row['question']} Only that." for row in rows)
        sums = [it["question"] for it, name in zip(rows, names, strict=True) if name == "chain_sum"]
        assert min(it.count(" + ") + it.count(" - ") for it in sums) >= 5
        found.append({row["prompt"] for row in rows})
        assert len(found[-1]) == 30
    assert len(found[0] & found[1]) < 5


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            {"path": "reasoning_gym:chainsum", "size": 3},
            "no such task; expected one such as chain_",
        ),
        ({"path": SUMS}, "size=None: expected the number of rows, 1 or more"),
        ({"path": SUMS, "size": 0}, "size=0: expected the number of rows"),
        ({"path": [SUMS, LEGS], "size": 3, "weights": [1]}, "2 tasks, 1 weights, 2 settings"),
        ({"path": [SUMS, LEGS], "size": 3, "settings": {}}, "2 tasks, 2 weights, 1 settings"),
        ({"path": [SUMS, LEGS], "size": 3, "weights": [1, 0]}, "'leg_counting'.*above 0, got 0"),
        ({"path": [SUMS, "openai/gsm8k"], "size": 3}, "expected one source, or a list of tasks"),
        ({"path": [], "size": 3}, "expected one source, or a list of tasks"),
        ({"path": SUMS, "size": 3, "settings": {"min_terms": Ellipsis}}, r"\['min_terms'\] is Ell"),
        ({"path": SUMS, "size": 3, "split": "test"}, "split: of data sets and files alone"),
        ({"path": "openai/gsm8k", "size": 3}, "size: of tasks of reasoning-gym"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        load_prompts(**arguments)


@pytest.mark.parametrize(
    ("task", "settings", "said"),
    [
        ("composite", {}, "no such task"),
        ("chain_sum", {"terms": 2}, "no setting 'terms'; it has allow_negation, max_digits"),
        ("chain_sum", {"seed": 2}, "load_prompts itself takes size and seed"),
        ("chain_sum", {"min_terms": 99}, "max_terms must be >= min_terms"),
    ],
)
def test_what_the_library_does_not_have(task: str, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(WorkflowError, match=said):
        library_task(task, settings)


def test_the_message_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_sc.sources.reasoning_gym.find_spec", lambda name: None)
    assert importlib.util.find_spec("reasoning_gym") is not None
    with pytest.raises(WorkflowError, match=r"pip install areal-sc\[reasoning-gym\]"):
        load_prompts(SUMS, size=3)
