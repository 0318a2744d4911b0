"""What a workflow says of itself before a run starts."""

from __future__ import annotations

from typing import Any

import pytest

from areal_sc.rewards.base import RunCode
from areal_sc.rewards.code.reward import CodeReward, code_reward
from areal_sc.workflows.base import EpisodeEngine, Workflow
from areal_sc.workflows.single_turn import SingleTurnWorkflow
from areal_sc.workflows.task_mix import MixedWorkflow


def length(prompt: dict[str, Any], completion: str) -> float:
    return float(len(completion))


async def runs(prompt: dict[str, Any], completion: str, run_code: RunCode) -> float:
    return float((await run_code(completion)).exit_code or 0)


class Tool(Workflow):
    """Runs what it is asked."""

    async def run_episode(self, prompt: dict[str, Any], engine: EpisodeEngine) -> None:
        return await self.play(engine)

    async def play(self, engine: EpisodeEngine) -> None:
        await engine.run_code("print(1)")


class OwnTool(Tool):
    """Inherits it."""


class Scored(Workflow):
    """Has a reward among what it was made of."""

    def __init__(self, reward: Any) -> None:
        self.by = reward


@pytest.mark.parametrize(
    ("workflow", "expected"),
    [
        (SingleTurnWorkflow(code_reward), True),
        (SingleTurnWorkflow(runs), True),
        (SingleTurnWorkflow({"length": length, "right": (CodeReward(), 0.5)}), True),
        (Tool(), True),
        (OwnTool(), True),
        (Scored(code_reward), True),
        (MixedWorkflow({"text": SingleTurnWorkflow(length), "code": Tool()}), True),
        (SingleTurnWorkflow(length), False),
        (SingleTurnWorkflow({"length": length, "again": (length, 0.5)}), False),
        (Scored(length), False),
        (Scored(None), False),
        (MixedWorkflow({"text": SingleTurnWorkflow(length)}), False),
    ],
)
def test_a_workflow_says_whether_it_runs_code(workflow: Workflow, *, expected: bool) -> None:
    assert workflow.runs_code() is expected
