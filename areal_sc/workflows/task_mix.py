"""Several tasks in one run: rows drawn by weights, each with the workflow and reward of its task.

tasks ──► TaskMix ──► a stream of rows, each with its task's name ──► its task's workflow
                                                                      └► reward/NAME, NAME's curve
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, zip_longest
from typing import Any, Final

import numpy as np

from areal_sc.config.schema import RolloutConfig
from areal_sc.errors import WorkflowError
from areal_sc.rewards.base import PART_PREFIX, RewardFunction, Score
from areal_sc.rewards.scores import scores_of_group
from areal_sc.sources.prompts import prompt_at
from areal_sc.sources.shares import numbers_by_weight
from areal_sc.token_fields import TEACHER_LOGPROBS, TOP_LOGPROBS, TensorMetadata
from areal_sc.workflows.base import EpisodeEngine, Trajectory, Workflow

TASK_KEY: Final = "task"
"""The column that names a row's task; a task's own workflow does not see it."""


@dataclass(frozen=True)
class Task:
    """One of several tasks.

    Attributes:
        prompts: its rows: a list, or an object with a length and numbered rows, which is shuffled
            anew in each of its epochs; or a stream, which must not end.
        workflow: plays its episodes.
        weight: > 0; its share of the rows is this over the sum of all weights.
    """

    prompts: Any
    workflow: Workflow
    weight: float = 1.0


class MixedWorkflow(Workflow):
    """Plays each episode by the workflow of its row's task.

    The reward of a trajectory of task NAME is also its metric `reward/NAME`, so each task has a
    curve, and a mean in each step, evaluation and summary. The mean of `share/NAME` is the task's
    share of the rows. Fields that other tasks have are 0.

    Args:
        workflows: by name of the task.
    """

    def __init__(self, workflows: Mapping[str, Workflow]) -> None:
        self.workflows = dict(workflows)
        self.fields = _fields_of_all(self.workflows)
        self.pictures_of_rows = any(it.pictures_of_rows for it in self.workflows.values())

    async def run_episode(
        self, prompt: dict[str, Any], engine: EpisodeEngine
    ) -> Trajectory | Sequence[Trajectory] | None:
        name = prompt.pop(TASK_KEY)
        played = await self.workflows[name].run_episode(prompt, engine)
        if played is None:
            return None
        if isinstance(played, Trajectory):
            return self._as_of_mix(played, name)
        return [self._as_of_mix(row, name) for row in played]

    async def score_group(
        self, prompt: dict[str, Any], trajectories: Sequence[Trajectory]
    ) -> Sequence[float] | None:
        """By the workflow of the task, whose curve is of what that gives."""
        name = prompt.pop(TASK_KEY)
        rewards = await self.workflows[name].score_group(prompt, trajectories)
        if rewards is None:
            return None
        return [
            Score(it, {**it.parts, name: float(it)}, it.shaping, it.weights)
            for it in scores_of_group(rewards, len(trajectories))
        ]

    def group_voter(self, prompt: Mapping[str, Any]) -> RewardFunction | None:
        return self.workflows[prompt[TASK_KEY]].group_voter(_without_name(prompt))

    @property
    def scores_groups(self) -> bool:
        return any(workflow.scores_groups for workflow in self.workflows.values())

    def _as_of_mix(self, row: Trajectory, name: str) -> Trajectory:
        """With its task's curve, and zeros in the fields that other tasks have."""
        zeros = {
            other: np.zeros([it or 0 for it in field.shape_for(len(row.input_ids))], field.dtype)
            for other, field in self.fields.items()
            if other not in self.workflows[name].fields
        }
        curve = {f"{PART_PREFIX}{name}": float(row.reward)}
        shares = {f"share/{other}": float(other == name) for other in self.workflows}
        metrics = {**row.metrics, **curve, **shares}
        return replace(row, metrics=metrics, fields={**zeros, **row.fields})

    def runs_code(self) -> bool:
        return any(workflow.runs_code() for workflow in self.workflows.values())

    def check(self) -> None:
        for workflow in self.workflows.values():
            workflow.check()

    def check_group_reward(self) -> None:
        for workflow in self.workflows.values():
            workflow.check_group_reward()

    def check_settings(self, config: RolloutConfig) -> None:
        for workflow in self.workflows.values():
            workflow.check_settings(config)

    def check_row(self, row: Mapping[str, Any]) -> None:
        name = row.get(TASK_KEY)
        if name not in self.workflows:
            raise WorkflowError(
                f"{TASK_KEY!r} of the row: expected one of {', '.join(self.workflows)}, got "
                f"{name!r}; `TaskMix.rows` marks rows with their tasks"
            )
        self.workflows[name].check_row(_without_name(row))


class TaskMix(Iterable[dict[str, Any]]):
    """A stream of the tasks' rows, drawn by their weights; `trainer.fit(mix.workflow, mix)`.

    The order is the same whenever it is read, so a resumed run goes on where it was. Of the first n
    rows each task has its share, to within one row for each of the other tasks.

    Args:
        tasks: by name.
        seed: of the order of rows in each task.

    Attributes:
        workflow: plays them all.
    Raises: WorkflowError: there is no task, one has no row or a weight that is not above 0, a name
        with `/`, or a workflow that waits for agents outside.
    """

    def __init__(self, tasks: Mapping[str, Task], *, seed: int = 0) -> None:
        if not tasks:
            raise WorkflowError("tasks: expected at least one")
        for name, task in tasks.items():
            if not 0 < task.weight < float("inf"):
                raise WorkflowError(f"task {name!r}: expected a weight above 0, got {task.weight}")
            if not name or "/" in name:
                raise WorkflowError(f"task {name!r}: expected a name without '/'")
            if hasattr(task.prompts, "__len__") and not len(task.prompts):
                raise WorkflowError(f"task {name!r} has no rows")
            if task.workflow.waits_outside:
                raise WorkflowError(
                    f"task {name!r} waits for agents outside, for which the others would have to "
                    "wait, too: give it a run of its own"
                )
        self._tasks = dict(tasks)
        self._seed = seed
        self.workflow = MixedWorkflow({name: task.workflow for name, task in tasks.items()})

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = {name: self._rows_of(name, task.prompts) for name, task in self._tasks.items()}
        names = list(rows)
        for number in numbers_by_weight([task.weight for task in self._tasks.values()]):
            yield next(rows[names[number]])

    @staticmethod
    def rows(prompts: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """Rows of several tasks, by name, for an evaluation: one of each task in turn.

        Raises: WorkflowError: a row has a column of the name `task` already.
        """
        marked = ([_with_name(row, name) for row in rows] for name, rows in prompts.items())
        return [row for row in chain.from_iterable(zip_longest(*marked)) if row is not None]

    def _rows_of(self, name: str, prompts: Any) -> Iterator[dict[str, Any]]:
        if not hasattr(prompts, "__len__"):
            for row in prompts:
                yield _with_name(row, name)
            raise WorkflowError(f"the stream of task {name!r} has ended: let it go on")
        for position in count():
            yield _with_name(prompts[prompt_at(position, len(prompts), self._seed)], name)


def _with_name(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    if TASK_KEY in row:
        raise WorkflowError(
            f"a row of task {name!r} has a column {TASK_KEY!r}, which names its task in a mix: "
            "give the column another name"
        )
    return {**row, TASK_KEY: name}


def _without_name(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != TASK_KEY}


def _fields_of_all(workflows: Mapping[str, Workflow]) -> dict[str, TensorMetadata]:
    """Raises: WorkflowError: two of them have a field of one name that is not the same."""
    fields = dict[str, TensorMetadata]()
    for name, workflow in workflows.items():
        for field, declared in workflow.fields.items():
            if fields.setdefault(field, declared) != declared:
                raise WorkflowError(
                    f"task {name!r}: another task's field {field!r} is not the same"
                )
    for field in fields.keys() & {TEACHER_LOGPROBS, TOP_LOGPROBS}:
        if lacking := [name for name, it in workflows.items() if field not in it.fields]:
            raise WorkflowError(
                f"task {', '.join(lacking)}: it has no teacher, and others have: zeros would be "
                "trained as what a teacher says; give each task one, or none"
            )
    return fields
