"""What is kept of the ledger: its whole state, and a record of each change. See `Ledger`."""

from __future__ import annotations

from msgspec import Struct

from areal_sc.controller.group import Group
from areal_sc.metadata import BatchMetadata, PromptReference


class LedgerState(Struct, frozen=True, array_like=True):
    """The whole ledger.

    Attributes:
        unconsumed: copies of the groups.
        untrained_step: the newest step that consumed groups.
        untrained: of those groups the ones that were not trained yet, ascending.
    """

    next_id: int
    unconsumed: tuple[Group, ...]
    num_consumed: int
    rejected: dict[str, int]
    rows_consumed: int
    rows_trained: int
    rows_trained_twice: int
    untrained_step: int
    untrained: tuple[int, ...]


class Admit(Struct, frozen=True, array_like=True, tag=True):
    group_id: int
    prompt: PromptReference
    version: int


class Start(Struct, frozen=True, array_like=True, tag=True):
    group_id: int
    worker: str


class Finish(Struct, frozen=True, array_like=True, tag=True):
    group_id: int
    attempt: int
    batch: BatchMetadata


class Requeue(Struct, frozen=True, array_like=True, tag=True):
    group_id: int


class RequeueAll(Struct, frozen=True, array_like=True, tag=True):
    pass


class Reject(Struct, frozen=True, array_like=True, tag=True):
    group_id: int
    reason: str


class Consume(Struct, frozen=True, array_like=True, tag=True):
    group_ids: tuple[int, ...]
    step: int


class Trained(Struct, frozen=True, array_like=True, tag=True):
    """The number of rows of each group."""

    num_rows: dict[int, int]


Record = Admit | Start | Finish | Requeue | RequeueAll | Reject | Consume | Trained
"""A change of the ledger: the call of the method that makes it."""
