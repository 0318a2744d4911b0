"""What a user sees who errs in the `task` section of an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonl_math
import letter_sort
import pytest

from areal_sc.errors import ConfigError
from areal_sc.preflight.load import load_config

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("main", "file", "changes", "said"),
    [
        (letter_sort.main, "letter_sort", ["task.max_leters=5"], "did you mean task.max_letters"),
        (letter_sort.main, "letter_sort", ["task.warm_start.step=5"], "task.warm_start.steps"),
        (letter_sort.main, "letter_sort", ["task.max_letters=few"], "an integer, got 'few'"),
        (letter_sort.main, "letter_sort", ["task.max_letters=27"], "at most 26, got 27"),
        (letter_sort.main, "letter_sort", ["task.warm_start.steps=-1"], "above 0, got -1"),
        (letter_sort.main, "letter_sort", ["task.median_letters=0"], "above 0, got 0.0"),
        (jsonl_math.main, "jsonl_math", ["task.reward=???"], "task.reward (one of exact, numeric)"),
        (jsonl_math.main, "jsonl_math", ["task.reward=best"], "one of exact, numeric, got 'best'"),
        (jsonl_math.main, "jsonl_math", ["task.num_held_out=-1"], "task.num_held_out: expected 0"),
    ],
)
def test_it_is_named_with_what_is_possible(
    main: Callable[[list[str]], None], file: str, changes: list[str], said: str
) -> None:
    argv = ["--config", str(CONFIGS / f"{file}.yaml"), "actor.path=m", *changes]
    with pytest.raises(ConfigError) as refusal:
        main(argv)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("script", "pattern"), [(letter_sort, "letter_sort*.yaml"), (jsonl_math, "[jo]*.yaml")]
)
def test_shipped_yamls_name_settings_that_the_script_knows(script: Any, pattern: str) -> None:
    for path in CONFIGS.glob(pattern):
        argv = ["--config", str(path), "actor.path=m"]
        load_config(argv, script.Config, count_devices=lambda: 2)
