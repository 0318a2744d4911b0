"""A group: one admitted prompt and, once they are generated, its trajectories."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final

from msgspec import Struct

from areal_sc.errors import WorkflowError
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.sizing.pictures import fields_of_rows
from areal_sc.sizing.store_room import field_bytes_of
from areal_sc.sources.prompt_choice import PromptPast
from areal_sc.sources.prompts import JsonlPrompts, prompt_at
from areal_sc.sources.row_file import PromptSource
from areal_sc.token_fields import (
    MADE_FIELDS,
    PICTURES,
    ROUTED_EXPERTS,
    TRAJECTORY_FIELDS,
    FieldBytes,
    TensorMetadata,
)
from areal_sc.workflows.base import Workflow

UNUSABLE: Final = 8
"""First rows: where no model can be asked anything of so many, it is not these rows alone."""

MakeReadable = Callable[[int, int], Awaitable[None]]
"""Called with a dataset and the number of a row; returns when workers can read it."""


class GroupState(StrEnum):
    queued = "queued"
    running = "running"
    finished = "finished"
    consumed = "consumed"
    rejected = "rejected"


class Group(Struct, array_like=True):
    """One admitted prompt. Only the ledger that admitted it changes it.

    Attributes:
        group_id: place in the order of admission.
        admitted_version: policy version at admission; staleness counts from here.
        attempt: which run of the group is current; only its result counts.
        worker: who generates, or holds, its rows; None while queued.
        batch: its rows, from when it is finished; None otherwise.
        metrics: metric of the workflow -> (sum, number of episodes), as long as it has a batch.
    """

    group_id: int
    prompt: PromptReference
    admitted_version: int
    attempt: int = 0
    state: GroupState = GroupState.queued
    worker: str | None = None
    batch: BatchMetadata | None = None
    metrics: dict[str, tuple[float, int]] = {}


@dataclass(frozen=True)
class RolloutSource:
    """A dataset and a workflow, by the numbers under which the workers know them.

    Attributes:
        num_prompts: rows of the dataset; None: a stream, which does not say.
        waits_outside: see `Workflow`.
    """

    dataset: int
    workflow: int
    num_prompts: int | None
    waits_outside: bool = False

    def prompt(self, index: int, seed: int) -> PromptReference:
        return PromptReference(self.dataset, index, seed)

    def next_prompt(self, num_taken: int, seed: int) -> PromptReference:
        """The one after so many of all epochs.

        Rows are shuffled in each epoch, unless it is a stream, which has its order.
        """
        index = num_taken
        if self.num_prompts is not None:
            index = prompt_at(num_taken, self.num_prompts, seed)
        return self.prompt(index, seed)

    def num_wanted(self, num: int | None, argument: str) -> int:
        """How many prompts a call is for; None: all.

        Raises: WorkflowError: all of a stream.
        """
        wanted = num or self.num_prompts
        if wanted is None:
            raise WorkflowError(f"a stream of prompts has no length: give {argument}, how many")
        return wanted


def past_of(
    batch: BatchMetadata, metrics: Mapping[str, tuple[float, int]], before: PromptPast | None
) -> PromptPast:
    """What a prompt has given, once another group of it is finished.

    Args:
        batch, metrics: see `Group`.
        before: what it had given until then.
    """
    rows = batch.rows
    rewards = [fmean(rows[it].reward - rows[it].shaping for it in its) for its in batch.episodes]
    total, num_episodes = metrics.get("accuracy", (sum(rewards), len(rewards)))
    num_groups = 1 if before is None else before.num_groups + 1
    return PromptPast(num_groups, total / num_episodes, bool(batch.groups_with_signal))


def check_fields(workflow: Workflow, of_engine: Mapping[str, TensorMetadata]) -> FieldBytes:
    """The bytes of the fields that a workflow adds, and those that the engine does.

    Raises: WorkflowError: one has no name that a field may have.
    """
    where = f"{type(workflow).__name__}.fields"
    taken = *TRAJECTORY_FIELDS, *MADE_FIELDS, ROUTED_EXPERTS, PICTURES
    for name, field in workflow.fields.items():
        if not isinstance(field, TensorMetadata):
            raise WorkflowError(f"{where}: expected a TensorMetadata, got {field!r}")
        if not name.isidentifier() or name in taken:
            raise WorkflowError(
                f"{where}: expected a name other than {', '.join(taken)}; got {name!r}"
            )
    of_rows = workflow.pictures_of_rows
    return field_bytes_of(fields_of_rows(workflow.fields, of_engine, pictures_of_rows=of_rows))


def check_first_rows(prompts: PromptSource, workflow: Workflow) -> None:
    """Looks at some rows, if no code of the user's reads them.

    Raises: WorkflowError: the workflow can begin with none of them.
    """
    if not isinstance(prompts, list | tuple | JsonlPrompts):
        return
    refusals = []
    for index in range(min(len(prompts), UNUSABLE)):
        try:
            workflow.check_row(prompts[index])
            return
        except WorkflowError as error:
            refusals.append(error)
    raise refusals[0]
