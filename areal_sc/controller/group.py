"""A group: one admitted prompt and, once they are generated, its trajectories."""

from __future__ import annotations

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
        prompt: which prompt, by reference.
        admitted_version: policy version at admission; staleness counts from here.
        attempt: which run of the group is current; only its result counts.
        state: where it is in its life.
        worker: who generates, or holds, its rows; None while queued.
        batch: its rows, while finished; None otherwise.
        consumed_step: training step that took it, once consumed.
        reject_reason: why, once rejected.
    """

    group_id: int
    prompt: PromptReference
    admitted_version: int
    attempt: int = 0
    state: GroupState = GroupState.queued
    worker: str | None = None
    batch: BatchMetadata | None = None
    consumed_step: int | None = None
    reject_reason: str | None = None
