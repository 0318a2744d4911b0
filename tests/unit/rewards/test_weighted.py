"""Several rewards as one: what is accepted, what comes of it, and what the documents say."""

from __future__ import annotations

import asyncio
import math
import re
from pathlib import Path
from typing import Any

import pytest

from areal_sc.errors import RewardError, WorkflowError
from areal_sc.rejection import RejectionKind
from areal_sc.rewards.base import Score
from areal_sc.rewards.on_loop import score_on_loop
from areal_sc.rewards.weighted import weighted_functions
from areal_sc.sources.reference import ObjectReference, reference_of, resolve
from areal_sc.sources.values import to_wire
from areal_sc.workflows.base import Trajectory
from areal_sc.workflows.math_reward import exact_match
from areal_sc.workflows.registry import SourceReader, SourceRegistry
from areal_sc.workflows.single_turn import SingleTurnWorkflow

REWARDS = Path(__file__).parents[3] / "docs" / "rewards.md"


def length(prompt: dict[str, Any], completion: str) -> float:
    return float(len(completion))


def right(prompt: dict[str, Any], completion: str) -> float:
    return float(completion == prompt["answer"])


def trajectory(reward: float, **metrics: float) -> Trajectory:
    return Trajectory([3], [True], [-1.0], [0], [1.0], reward, metrics)


def test_a_function_alone_has_weight_1() -> None:
    found = weighted_functions({"right": exact_match, "length": (length, -1), "seen": (length, 0)})
    assert found == {"right": (exact_match, 1.0), "length": (length, -1.0), "seen": (length, 0.0)}
    assert weighted_functions(length) == {}


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ([exact_match, length], r"reward: expected a function, or several by name.*got \["),
        ({}, "got an empty mapping"),
        ({"a b": length}, "'a b': expected a name of ASCII letters"),
        ({"length/2": length}, "'length/2': expected a name"),
        ({1: length}, "reward 1: expected a name"),
        ({"length": 0.5}, "'length': expected a function, or a function and its weight, got 0.5"),
        ({"length": (0.5, length)}, "'length': expected a function, or a function and its weight"),
        ({"length": (length, math.nan)}, "'length': expected a finite weight, got nan"),
        ({"length": (length, 0.0), "right": (exact_match, 0)}, "all weights are 0"),
        (lambda completion: 1.0, r"reward: expected a function of a prompt .*got <lambda>\("),
        (
            {"length": lambda prompt, answer, *, tests: 1.0},
            "'length': .*missing a required .*tests",
        ),
    ],
)
def test_what_is_no_reward_is_refused_in_the_script(reward: Any, message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        SingleTurnWorkflow(reward).check()


def test_accuracy_is_that_of_the_first_reward_or_of_a_named_one(tmp_path: Path) -> None:
    rewards = {"right": right, "length": (length, 0.5)}
    registry = SourceRegistry(tmp_path, "rollout")
    number = registry.register_workflow(SingleTurnWorkflow(rewards))
    in_worker = SourceReader(tmp_path).workflow(number)  # in the script's order
    assert isinstance(in_worker, SingleTurnWorkflow)
    assert in_worker.reward == rewards
    assert in_worker.accuracy == "right"
    named = reference_of(SingleTurnWorkflow(rewards, accuracy="length")).to_wire()
    assert resolve(ObjectReference.from_wire(named)).accuracy == "length"
    with pytest.raises(WorkflowError, match=r"\(right, length\), got 'rigth'"):
        SingleTurnWorkflow(rewards, accuracy="rigth")
    with pytest.raises(WorkflowError, match="there is one alone"):
        SingleTurnWorkflow(exact_match, accuracy="right")


def test_the_parts_of_a_score_are_metrics_of_its_row() -> None:
    score = Score(0.75, {"right": 1.0, "length": -0.5})
    assert score == 0.75
    row = trajectory(score, turns=2.0)
    assert row.metrics == {"turns": 2.0, "reward/right": 1.0, "reward/length": -0.5}
    assert trajectory(0.9 * score, **score.metrics).metrics == score.metrics
    assert trajectory(Score(1.0)).metrics == {}
    with pytest.raises(ValueError, match=r"'reward/right' is 0.0, and .* gave 1.0"):
        trajectory(score, **{"reward/right": 0.0})


async def test_the_documented_reward_asks_its_judge_once_for_all() -> None:
    (code,) = re.findall(r"```python\n(import asyncio\n.*?)```", REWARDS.read_text(), re.DOTALL)
    asked: list[list[str]] = []

    async def ask_judge(completions: list[str]) -> list[float]:
        asked.append(completions)
        if "bad" in completions:
            raise ValueError("of the judge")
        return [float(len(text)) for text in completions]

    names: dict[str, Any] = {"ask_judge": ask_judge}
    exec(code, names)
    judged = names["judged"]
    first = asyncio.create_task(judged({}, "gone"))
    others = asyncio.gather(*(judged({}, "x" * n) for n in range(3)))
    await asyncio.sleep(0)
    first.cancel()  # an episode whose other reward failed, say
    assert await others == [0.0, 1.0, 2.0]
    assert await judged({}, "late") == 4.0
    assert asked == [["gone", "", "x", "xx"], ["late"]]
    with pytest.raises(ValueError, match="of the judge"):
        await judged({}, "bad")


@pytest.mark.parametrize(
    "score",
    [
        Score(1.0, {"a": math.nan}),
        Score(1.0, weights={"a": math.inf}),
        Score(1.0, None, math.nan),
        Score(1.0, {"a\n": 1.0}),
    ],
)
async def test_what_a_score_is_made_of_is_checked(score: Score) -> None:
    async def gives(prompt: Any, completion: str) -> Score:
        return score

    async def run_code(*_: Any) -> Any:
        raise NotImplementedError

    with pytest.raises(RewardError, match="the Score: ") as found:
        await score_on_loop(gives, "gives", to_wire([{}, "", {}]), limit_s=60, run_code=run_code)
    assert found.value.kind == RejectionKind.bad_reward
