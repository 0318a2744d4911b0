"""What is kept of the ledger: its whole state, and a record of each change. See `Ledger`.

They are msgpack lists, headed by a number that names the kind; a kind keeps its number for ever.
No record holds a prompt's text, or a tensor.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from areal_sc.controller.ledger.group import Group
from areal_sc.metadata import BatchMetadata, PromptReference
from areal_sc.sources.prompt_choice import PromptPast

Split = tuple[tuple[tuple[int, ...], ...], ...]
"""The rows of a batch that each trains: [data rank][minibatch][row of the batch]."""


class ConsumedStep(Struct, frozen=True, array_like=True):
    """A training step that goes on: its groups with their rows, in order."""

    step: int
    groups: tuple[Group, ...]


class LedgerState(Struct, array_like=True, tag=0):
    """The whole ledger, as a snapshot and the head of a journal's segment keep it.

    Attributes:
        unconsumed: copies of the groups; in a ledger itself they lie elsewhere, as `kept` do.
        rejected: number of groups by reason.
        untrained_step: the newest step that consumed groups.
        untrained: of those groups the ones that were not trained yet.
        lineage, version: name the newest policy.
        num_prompts_taken: position in the dataset, counted over all epochs.
        returned_prompts: of rejected groups; they are admitted before the next of the dataset.
        kept: steps that were not released, oldest first.
        past: what prompts have given, by dataset and index; empty where nothing is chosen by it.
    """

    next_id: int = 0
    unconsumed: tuple[Group, ...] = ()
    num_consumed: int = 0
    rejected: dict[str, int] = {}
    rows_consumed: int = 0
    rows_trained: int = 0
    rows_trained_twice: int = 0
    untrained_step: int = 0
    untrained: set[int] = set()
    lineage: int = 0
    version: int = 0
    num_prompts_taken: int = 0
    returned_prompts: tuple[PromptReference, ...] = ()
    kept: tuple[ConsumedStep, ...] = ()
    past: dict[int, dict[int, PromptPast]] = {}


class Admit(Struct, frozen=True, array_like=True, tag=1):
    """Attributes: num_prompts_taken: afterwards, with those that were passed over; it stays when a
    returned prompt is admitted."""

    group_id: int
    prompt: PromptReference
    version: int
    num_prompts_taken: int


class Start(Struct, frozen=True, array_like=True, tag=2):
    group_id: int
    attempt: int
    worker: str


class Finish(Struct, frozen=True, array_like=True, tag=3):
    """Attributes: metrics: of the workflow, for the mean over the batch that trains the group."""

    group_id: int
    attempt: int
    batch: BatchMetadata
    metrics: dict[str, tuple[float, int]]


class Requeue(Struct, frozen=True, array_like=True, tag=4):
    """Attributes: attempt: the new one."""

    group_id: int
    attempt: int
    cause: str


class Reject(Struct, frozen=True, array_like=True, tag=5):
    """Attributes: returns_prompt: it is admitted again, as another group."""

    group_id: int
    attempt: int
    reason: str
    returns_prompt: bool


class Consume(Struct, frozen=True, array_like=True, tag=6):
    """Attributes: group_ids: in the order of their rows in the batch."""

    lineage: int
    step: int
    group_ids: tuple[int, ...]


class Trained(Struct, frozen=True, array_like=True, tag=7):
    """A step was trained.

    Attributes:
        num_rows: that were trained of each group.
        splits: of each of its updates, in order. None, where rows of other batches were trained.
    """

    lineage: int
    step: int
    num_rows: dict[int, int]
    splits: tuple[Split, ...] = ()


class Publish(Struct, frozen=True, array_like=True, tag=8):
    lineage: int
    version: int


class Release(Struct, frozen=True, array_like=True, tag=9):
    """Steps up to this one are complete; their rows may go."""

    step: int


class TakeBack(Struct, frozen=True, array_like=True, tag=10):
    """The groups of the step that was consumed last are finished again; none was trained."""

    lineage: int
    step: int


class GoBack(Struct, frozen=True, array_like=True, tag=11):
    """A new lineage begins from an earlier state.

    Attributes: state: the ledger from then on; without groups, since all of them are given up.
    """

    state: LedgerState


Record = (
    Admit
    | Start
    | Finish
    | Requeue
    | Reject
    | Consume
    | Trained
    | Publish
    | Release
    | TakeBack
    | GoBack
)
"""A change of the ledger: the call of the method that makes it."""

WENT_BACK: Final = "went_back"
"""Why groups are rejected that an earlier state, which the ledger went back to, does not train."""


def gone_back(present: LedgerState, lineage: int, to: LedgerState) -> LedgerState:
    """How a ledger goes on when it leaves `present` for the earlier state `to`.

    Ids and rejections never go back: a late result names a group that is gone. Of the groups that
    were admitted, those that are neither trained in `to` nor rejected count as rejected. Prompts of
    `to` that were not trained come first again.
    """
    untrained = [
        group
        for step in to.kept
        for group in step.groups
        if step.step == to.version and group.group_id in to.untrained
    ]
    again = sorted([*untrained, *to.unconsumed], key=lambda group: group.group_id)
    num_consumed, next_id = to.num_consumed - len(untrained), max(present.next_id, to.next_id)
    num_rows = sum(group.batch.total_batch_size for group in untrained if group.batch)
    rejected = {
        reason: max(present.rejected.get(reason, 0), to.rejected.get(reason, 0))
        for reason in [*present.rejected, *to.rejected]
        if reason != WENT_BACK
    }
    if num_given_up := next_id - num_consumed - sum(rejected.values()):
        rejected[WENT_BACK] = num_given_up
    return replace(
        to,
        next_id=next_id,
        unconsumed=(),
        num_consumed=num_consumed,
        rejected=rejected,
        rows_consumed=to.rows_consumed - num_rows,
        untrained=set(),
        lineage=lineage,
        returned_prompts=(*(group.prompt for group in again), *to.returned_prompts),
        kept=(),
    )
