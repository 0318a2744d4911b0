"""What a user sees who errs in the `task` section of an example."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonl_math
import letter_sort
import openenv_task
import pytest
import verifiers_task

from areal_sc.config.schema import GRPOConfig
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


ON_CPUS = (
    *("--config", str(CONFIGS / "one_gpu.yaml"), "actor.path=m", "actor.device=cpu"),
    *("actor.activation_checkpointing=none", "rollout.device=cpu", "rollout.engine=local"),
)


def test_an_environment_is_named_beside_what_the_yaml_says_of_another_task() -> None:
    config = load_config([*ON_CPUS, "task={url: ws://h/ws, action: say, max_steps: 8}"], GRPOConfig)
    workflow = openenv_task.workflow_of(config.task)
    assert (workflow.url, workflow.action, workflow.max_steps) == ("ws://h/ws", "say", 8)


@pytest.mark.parametrize(
    ("main", "changes", "missing"),
    [
        (openenv_task.main, [], "task.url, task.action, task.max_steps"),
        (openenv_task.main, ["task={url: ws://h/ws, max_steps: 8}"], "task.action"),
        (verifiers_task.main, [], "task.taskset, task.num_tasks"),
        (verifiers_task.main, ["task={taskset: t}"], "task.num_tasks"),
    ],
)
def test_what_the_yaml_does_not_say_of_a_task_is_asked_for(
    main: Callable[[list[str]], None], changes: list[str], missing: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{missing}: not set; the command at the top of"):
        main([*ON_CPUS, "agents.python=python", *changes])
