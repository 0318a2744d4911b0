"""Sets of prompts: those of the script and those of the settings are one kind of thing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from areal_sc.config.follow_settings import EvaluationConfig, EvaluationSetConfig
from areal_sc.controller.rollout.evaluation import EvaluationSet
from areal_sc.errors import ConfigError, WorkflowError
from areal_sc.rewards.answers import ExactMatch
from areal_sc.trainer.evaluation.evaluation_sets import configured_sets, evaluation_sets
from areal_sc.workflows.base import Workflow
from areal_sc.workflows.math_reward import exact_match, numeric_match
from areal_sc.workflows.single_turn import SingleTurnWorkflow

NUMERIC = "areal_sc.workflows.math_reward:numeric_match"


class NoReward(Workflow):
    """Takes none."""


class Needs:
    """A reward that cannot be made without an argument."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __call__(self, prompt: dict[str, Any], completion: str) -> float:
        return float(self.limit)


def made() -> Workflow:
    return SingleTurnWorkflow(exact_match, prompt_key="question")


@pytest.fixture
def workflow() -> SingleTurnWorkflow:
    return SingleTurnWorkflow(exact_match, None, True)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1", "solution": "2"}) + "\n")
    return str(path)


def one_set(prompts: str, **others: Any) -> EvaluationConfig:
    keys = {"prompt_key": "problem", "answer_key": "solution"}
    return EvaluationConfig(sets=[EvaluationSetConfig("aime", prompts, **keys, **others)])


def test_a_set_of_the_settings_has_the_runs_workflow_with_its_own_reward(
    prompts: str, workflow: SingleTurnWorkflow
) -> None:
    config = one_set(prompts, num_samples=8, temperature=0.5, reward=NUMERIC)
    found = configured_sets(config, workflow)["aime"]
    assert isinstance(found.workflow, SingleTurnWorkflow)
    assert found.workflow.reward is numeric_match
    assert found.workflow.use_chat_template, "the rest is that of the run"
    assert workflow.reward is exact_match
    assert (found.num_samples, found.temperature, found.num_prompts) == (8, 0.5, None)
    assert list(found.prompts) == [  # type: ignore[arg-type]
        {"problem": "1+1", "solution": "2", "prompt": "1+1", "answer": "2"}
    ]
    assert configured_sets(one_set(prompts), workflow)["aime"].workflow is workflow


def test_a_set_may_have_a_workflow_and_the_class_of_a_reward(
    prompts: str, workflow: SingleTurnWorkflow
) -> None:
    config = one_set(
        prompts, workflow=f"{__name__}:made", reward="areal_sc.rewards.answers:ExactMatch"
    )
    found = configured_sets(config, workflow)["aime"].workflow
    assert isinstance(found, SingleTurnWorkflow)
    assert (found.prompt_key, type(found.reward)) == ("question", ExactMatch)


def test_the_reward_of_a_set_decides_its_accuracy(prompts: str) -> None:
    rewards = {"length": exact_match, "right": exact_match}
    several = SingleTurnWorkflow(rewards, accuracy="right")
    found = configured_sets(one_set(prompts, reward=NUMERIC), several)["aime"].workflow
    assert isinstance(found, SingleTurnWorkflow)
    assert (found.reward, found.accuracy) == (numeric_match, "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": "nothing.here:at_all"}, "aime: reward: expected package.module:name, got"),
        ({"reward": "numeric_match"}, "aime: reward: expected package.module:name, got"),
        (
            {"workflow": "json:dumps"},
            "aime: workflow: expected what can be made without arguments, got TypeError: dumps",
        ),
        ({"reward": f"{__name__}:Needs"}, "aime: reward: expected what can be made without"),
        ({"reward": "json:__name__"}, "aime: reward: "),
        ({"workflow": "builtins:dict"}, "expected a Workflow, or what makes one"),
        (
            {"workflow": f"{__name__}:NoReward", "reward": NUMERIC},
            "NoReward takes no argument of that name",
        ),
    ],
)
def test_what_cannot_be_used_is_told_by_the_name_of_the_set(
    prompts: str, workflow: Workflow, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        configured_sets(one_set(prompts, **changes), workflow)


def test_prompts_that_are_not_there(workflow: Workflow) -> None:
    with pytest.raises(WorkflowError, match=r"evaluation\.sets, aime: .*does not exist"):
        configured_sets(one_set("none.jsonl"), workflow)


def test_the_scripts_own_prompts_have_a_name_where_there_are_others(workflow: Workflow) -> None:
    config = EvaluationConfig(num_prompts=7, num_samples=4)
    rows = [{"prompt": "1"}]
    alone = evaluation_sets(rows, {}, workflow, config)
    assert alone == {"": EvaluationSet(rows, workflow, 7, 4, None)}
    more = {"aime": EvaluationSet(rows, workflow, num_samples=16)}
    both = evaluation_sets(rows, more, workflow, config)
    assert list(both) == ["held_out", "aime"]
    assert both["aime"].num_samples == 16
    streams = {"s": iter(rows), "t": EvaluationSet(iter(rows), num_prompts=2), "rows": rows}
    named = evaluation_sets(streams, {}, workflow, config)
    assert [it.num_prompts for it in named.values()] == [7, 2, None], "all, where that is known"
    greedy = {"g": EvaluationSet(rows, temperature=0.0)}
    assert evaluation_sets(greedy, {}, workflow, config)["g"].num_samples == 1
    with pytest.raises(ConfigError, match="the script has a set 'aime', too"):
        evaluation_sets({"aime": rows}, more, workflow, config)
