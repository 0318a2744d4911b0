"""A group: one admitted prompt and, once they are generated, its trajectories."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

from areal_sc.metadata import BatchMetadata, PromptReference


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
        batch: its rows, while finished; None otherwise.
    """

    group_id: int
    prompt: PromptReference
    admitted_version: int
    attempt: int = 0
    state: GroupState = GroupState.queued
    worker: str | None = None
    batch: BatchMetadata | None = None


@dataclass(frozen=True)
class RolloutSource:
    """A dataset and a workflow, by the numbers under which the workers know them."""

    dataset: int
    workflow: int
    num_prompts: int

    def prompt(self, index: int, seed: int) -> PromptReference:
        return PromptReference(self.dataset, index, seed)
