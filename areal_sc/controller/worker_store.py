"""What a controller knows of one worker's store: the room that its runs take in it.

    begin ──► running ──► end ──► sealed, needed ──► sealed, dead ──► forgotten by the worker
              takes room   │      takes room         takes room       room is free
                           └────► nothing was sealed                  room is free
    shards that are held for it, from an earlier life of the worker, are its own from `begin` on

A run of a group, or a computation, takes room from the moment it is given to the worker until the
worker has said that nothing of it is left, however many shards it seals. A run that nobody waits
for any more may still seal some, so it keeps its room until the worker has ended it.

`WorkerStore` is pure state: nothing in it waits. `ComputedFields` has one for each rank of a model:

    compute ──► sealed by the head of each share ──► read by trainers ──► its rows are not needed
                                                                          └► the ranks forget it

A model that publishes its weights forgets all fields with each publication. A model that does not,
a reference model, say, forgets them here, before it computes the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from areal_sc.controller.shared_card import NeedsRun
from areal_sc.fleet.fleet import Fleet
from areal_sc.fleet.member import Member
from areal_sc.metadata import RowMetadata
from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.workers import calls
from areal_sc.workers.calls import GroupAttempt, Sweep

RunT = TypeVar("RunT", bound=Hashable)

Needs = Callable[[RunT], bool]
"""Whether what this run has sealed may still be read.

It is asked when a sweep is planned. The plan is sent in the same turn of the event loop, so what it
says of live, dead and acknowledged shards is one state.
"""


class _Mark(NamedTuple, Generic[RunT]):
    """A point in the order of sealing that may be acknowledged once `runs` have ended."""

    incarnation: str
    sequence: int
    runs: frozenset[RunT]


class WorkerStore(Generic[RunT]):
    """The runs that take room in one worker's store."""

    def __init__(self, needs: Needs[RunT]) -> None:
        self._needs = needs
        self._runs: set[RunT] = set()
        self._shards: dict[str, RunT | None] = {}  # None: of no run
        self._mark = _Mark[RunT]("", 0, frozenset())
        self._acknowledged = self._mark

    @property
    def num_running(self) -> int:
        """Runs that the worker has not ended: each may still seal a shard."""
        return len(self._runs)

    @property
    def num_held(self) -> int:
        """Runs that do not go on, and whose shards are not known to be gone."""
        return len(set(self._shards.values()) - self._runs - {None})

    @property
    def has_dead(self) -> bool:
        """Whether a shard lies in the store that nobody needs any more."""
        return not all(map(self._is_needed, self._shards.values()))

    @property
    def needs_any(self) -> bool:
        """Whether a shard lies in the store that somebody needs."""
        return any(map(self._is_needed, self._shards.values()))

    @property
    def num_needed(self) -> int:
        """Runs that go on, or whose shards somebody needs."""
        return len({run for run in self._shards.values() if self._is_needed(run)} | self._runs)

    def begin(self, run: RunT, shard_ids: Iterable[str] = ()) -> None:
        """The worker is asked for it, and has these shards of it already."""
        self._runs.add(run)
        self._shards.update(dict.fromkeys(shard_ids, run))

    def end(self, run: RunT, shard_ids: Iterable[str]) -> None:
        """The worker has ended the run, and told what it sealed."""
        self._runs.remove(run)
        self._shards.update(dict.fromkeys(shard_ids, run))

    def expect(self, shards: Mapping[str, RunT]) -> None:
        """These shards are there, as the ledger says; `note_adopted` with what is there follows."""
        self._shards = dict(shards)

    def hold_for(self, runs: Mapping[str, RunT]) -> None:
        """Shards, by their ids, are for these runs from now on."""
        self._shards.update(runs)

    def note_adopted(self, held: Mapping[str, RunT | None]) -> list[RunT]:
        """The worker was started again, or taken over, and holds these shards.

        Args:
            held: each with the run that it is for, where nobody needs it for the one known here;
                None: it is of no run, and takes no room, as a copy of weights.
        Returns: the runs whose shards are gone. Unknown shards, of runs whose reply was lost, take
            room until they are swept.
        """
        known = self._shards
        lost = dict.fromkeys(run for shard_id, run in known.items() if shard_id not in held)
        needed = {i: run for i, run in known.items() if run is not None and self._needs(run)}
        self._shards = {i: needed.get(i, held[i]) for i in sorted(held)}
        return [run for run in lost if run is not None]

    def plan_sweep(self, incarnation: str) -> tuple[Sweep, list[str]]:
        """What the worker may forget now; to be sent before anything else happens.

        Args:
            incarnation: the worker's present life. Shards of earlier lives are adopted ones, and
                what an earlier life has acknowledged is not said to this one.
        Returns: what is asked of it, and the ids of the shards that are gone when it replies.
        """
        if not self._mark.runs & self._runs:
            self._acknowledged = self._mark
        live: list[int] = []
        dead: list[int] = []
        adopted_live: list[str] = []
        dead_ids: list[str] = []
        for shard_id, run in self._shards.items():
            life, sequence = parse_shard_id(shard_id)
            is_own, is_needed = life == incarnation, self._is_needed(run)
            if is_own:
                (live if is_needed else dead).append(sequence)
            elif is_needed:
                adopted_live.append(shard_id)
            if not is_needed:
                dead_ids.append(shard_id)
        is_current = self._acknowledged.incarnation == incarnation
        acknowledged = self._acknowledged.sequence if is_current else 0
        return Sweep(acknowledged, tuple(live), tuple(dead), tuple(adopted_live)), dead_ids

    def confirm_sweep(self, incarnation: str, dead_ids: Iterable[str], last_sequence: int) -> None:
        """The worker has done what was planned.

        Args:
            last_sequence: number of the newest shard in its store at that time. Once the runs that
                go on now have ended, every shard up to it is known here, or its reply was lost and
                nobody needs it.
        """
        for shard_id in dead_ids:
            self._shards.pop(shard_id, None)  # `expect` may have been told others meanwhile
        if self._mark is self._acknowledged:
            self._mark = _Mark(incarnation, last_sequence, frozenset(self._runs))

    def _is_needed(self, run: RunT | None) -> bool:
        return run is not None and (run in self._runs or self._needs(run))


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
