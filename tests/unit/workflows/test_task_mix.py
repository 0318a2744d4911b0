from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from itertools import count, islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_sc.agents.online import OnlineWorkflow
from areal_sc.errors import WorkflowError
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow
from areal_sc.workflows.task_mix import Task, TaskMix


class Scored(Workflow):
    """Gives a number of trajectories of one reward; None: it rejects the episode."""

    def __init__(self, reward: float, num_rows: int | None = 1) -> None:
        self.reward = reward
        self.num_rows = num_rows

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        assert prompt == {"prompt": "p"}, "the task's own workflow does not see the task's name"
        row = Trajectory([1, 2], [False, True], [0, -1.0], [-1, 0], [1, 1], self.reward, {"n": 2.0})
        if self.num_rows is None:
            return None
        return row if self.num_rows == 1 else [row] * self.num_rows

    def check(self) -> None:
        if self.reward < 0:
            raise WorkflowError("no reward below 0")

    def check_row(self, row: Any) -> None:
        if row != {"prompt": "p"}:
            raise WorkflowError(f"what is {row}")


ANY = Scored(1.0)


def numbered(size: int) -> list[dict[str, Any]]:
    return [{"row": index} for index in range(size)]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=5), st.integers(1, 300))
def test_each_task_has_its_share_of_the_first_rows(weights: list[float], num_rows: int) -> None:
    tasks = {str(number): Task(numbered(3), ANY, it) for number, it in enumerate(weights)}
    taken = Counter(row["task"] for row in islice(TaskMix(tasks), num_rows))
    for number, weight in enumerate(weights):
        due = num_rows * weight / sum(weights)
        assert abs(taken[str(number)] - due) <= max(1, len(weights) - 1) + 1e-6


def test_each_epoch_of_a_task_has_all_its_rows_in_another_order() -> None:
    mix = TaskMix({"a": Task(numbered(7), ANY, 3), "b": Task(numbered(2), ANY)}, seed=5)
    rows = [row["row"] for row in islice(mix, 4 * 7) if row["task"] == "a"]
    epochs = [rows[start : start + 7] for start in range(0, 21, 7)]
    assert [sorted(epoch) for epoch in epochs] == [list(range(7))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [row["row"] for row in islice(mix, 4 * 7) if row["task"] == "a"] == rows, "read again"


def test_a_stream_keeps_its_order_and_must_not_end() -> None:
    endless = ({"row": number} for number in count())
    mix = TaskMix({"stream": Task(endless, ANY), "list": Task(numbered(1), ANY)})
    assert [row["row"] for row in islice(mix, 6) if row["task"] == "stream"] == [0, 1, 2]
    with pytest.raises(WorkflowError, match="stream of task 'a' has ended"):
        list(islice(TaskMix({"a": Task(iter(numbered(2)), ANY)}), 3))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_episode_is_played_by_its_task_and_has_its_curve(num_rows: int) -> None:
    tasks = {"a": Task([{"prompt": "p"}], Scored(0.25, num_rows)), "b": Task([{}], ANY)}
    prompt = next(iter(TaskMix(tasks)))
    engine: Any = None
    played = asyncio.run(TaskMix(tasks).workflow.run_episode(prompt, engine))
    rows = played if isinstance(played, list) else [played]
    assert len(rows) == num_rows
    for row in rows:
        assert row.reward == 0.25
        assert row.metrics == {"n": 2.0, "reward/a": 0.25, "share/a": 1.0, "share/b": 0.0}


def test_an_episode_may_be_rejected() -> None:
    mix, engine = TaskMix({"a": Task([{"prompt": "p"}], Scored(0, None))}), None
    assert asyncio.run(mix.workflow.run_episode(next(iter(mix)), engine)) is None  # type: ignore[arg-type]


def test_rows_of_an_evaluation_come_in_turn() -> None:
    rows = TaskMix.rows({"a": numbered(3), "b": numbered(1)})
    assert [(row["task"], row["row"]) for row in rows] == [("a", 0), ("b", 0), ("a", 1), ("a", 2)]


def test_what_is_wrong_is_told_before_a_run() -> None:
    mix = TaskMix({"good": Task([{"prompt": "p"}], ANY), "bad": Task([{}], Scored(-1.0))})
    with pytest.raises(WorkflowError, match="no reward below 0"):
        mix.workflow.check()
    mix.workflow.check_row({"prompt": "p", "task": "good"})
    with pytest.raises(WorkflowError, match="what is"):
        mix.workflow.check_row({"task": "good"})
    with pytest.raises(WorkflowError, match="expected one of good, bad, got None"):
        mix.workflow.check_row({"prompt": "p"})


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({}, "at least one"),
        ({"a": Task([{}], ANY, 0.0)}, "weight above 0, got 0"),
        ({"a": Task([{}], ANY, float("nan"))}, "weight above 0, got nan"),
        ({"a": Task([{}], ANY, float("inf"))}, "weight above 0, got inf"),
        ({"a/b": Task([{}], ANY)}, "without '/'"),
        ({"a": Task([], ANY)}, "'a' has no rows"),
        ({"a": Task([{}], OnlineWorkflow())}, "'a' waits for agents outside"),
    ],
)
def test_tasks_are_checked(tasks: dict[str, Task], message: str) -> None:
    with pytest.raises(WorkflowError, match=message):
        TaskMix(tasks)


def test_a_row_has_no_task_of_its_own() -> None:
    with pytest.raises(WorkflowError, match="has a column 'task'"):
        next(iter(TaskMix({"a": Task([{"task": 1}], ANY)})))
    with pytest.raises(WorkflowError, match="has a column 'task'"):
        TaskMix.rows({"a": [{"task": 1}]})
