"""The fields that the ranks of a model have computed, as long as their rows may be read.

    compute ──► sealed by the head of each share ──► read by trainers ──► its rows are not needed
                                                                          └► the ranks forget it

A model that publishes its weights forgets all fields with each publication. A model that does not,
a reference model, say, forgets them here, before it computes the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from areal_sc.controller.common import NeedsRun
from areal_sc.controller.worker_store import WorkerStore
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.metadata import RowMetadata
from areal_sc.workers import calls
from areal_sc.workers.calls import GroupAttempt


class _Computation(NamedTuple):
    """One field of one batch, and the runs of groups that its rows are of."""

    number: int
    runs: frozenset[GroupAttempt]


class ComputedFields:
    """What lies in the stores of the ranks of one model that publishes no weights."""

    def __init__(self, fleet: Fleet, needs: Set[NeedsRun]) -> None:
        self._fleet = fleet
        self._needs = needs
        self._numbers = count()
        self._stores: dict[str, WorkerStore[_Computation]] = {}

    @contextmanager
    def computing(self, rows: Sequence[RowMetadata]) -> Iterator[list[calls.SealedShard]]:
        """Around a computation; the body adds what was sealed to the list that it gets."""
        runs = frozenset(GroupAttempt(row.group_id, row.attempt) for row in rows)
        computation, sealed = _Computation(next(self._numbers), runs), list[calls.SealedShard]()
        stores = {member.name: self._store(member) for member in self._fleet.members}
        for store in stores.values():
            store.begin(computation)
        try:
            yield sealed
        finally:
            for name, store in stores.items():
                store.end(computation, _ids_at(name, sealed))

    async def sweep(self) -> None:
        """The ranks forget the fields none of whose rows is needed."""
        members = [it for it in self._fleet.members if self._store(it).has_dead]
        planned = [self._store(it).plan_sweep(it.worker.incarnation) for it in members]
        lives = [it.worker.incarnation for it in members]
        newest = await self._fleet.call_each(
            calls.SWEEP, [sweep for sweep, _ in planned], members=members
        )
        for member, life, (_, dead), last in zip(members, lives, planned, newest, strict=True):
            self._store(member).confirm_sweep(life, dead, last)

    def _store(self, member: Member) -> WorkerStore[_Computation]:
        return self._stores.setdefault(member.name, WorkerStore(self._is_needed))

    def _is_needed(self, computation: _Computation) -> bool:
        """Rows of which no rollout controller knows stay: nobody says when they go."""
        if not self._needs:
            return True
        return any(needs(run) for needs in self._needs for run in computation.runs)


def _ids_at(name: str, sealed: Iterable[calls.SealedShard]) -> list[str]:
    shards = (it.shard for it in sealed)
    return [shard.shard_id for shard in shards if shard.node_id == name and shard.shard_id]
