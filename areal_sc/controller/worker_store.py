"""What a controller knows of one rollout worker's store: the room that groups take in it.

    begin ──► running ──► end ──► sealed, needed ──► sealed, dead ──► forgotten by the worker
              takes room   │      takes room         takes room       room is free
                           └────► nothing was sealed                  room is free

A group takes room from the moment it is given to the worker until the worker has said that nothing
of it is left. A run that nobody waits for any more may still seal its shard, so it keeps its room
until the worker has ended it.

Pure state: nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from areal_sc.transport.shards.ids import parse_shard_id
from areal_sc.workers.calls import GroupAttempt, Sweep

Needs = Callable[[GroupAttempt], bool]
"""Whether the rows of this run of a group may still be read.

It is asked when a sweep is planned. The plan is sent in the same turn of the event loop, so what it
says of live, dead and acknowledged shards is one state.
"""


class _Mark(NamedTuple):
    """A point in the order of sealing that may be acknowledged once `runs` have ended."""

    incarnation: str
    sequence: int
    runs: frozenset[GroupAttempt]


_NOBODYS: Final = GroupAttempt(0, -1)
"""Stands for the run of a shard of which no reply told."""


class WorkerStore:
    """The groups that take room in one worker's store."""

    def __init__(self, needs: Needs) -> None:
        self._needs = needs
        self._runs: set[GroupAttempt] = set()
        self._shards: dict[str, GroupAttempt] = {}
        self._mark = _Mark("", 0, frozenset())
        self._acknowledged = self._mark

    @property
    def num_running(self) -> int:
        """Groups that the worker has not ended: each may still seal a shard."""
        return len(self._runs)

    @property
    def num_held(self) -> int:
        """Groups whose shard was sealed, and is not known to be gone."""
        return len(self._shards)

    @property
    def has_dead(self) -> bool:
        """Whether a shard lies in the store that nobody needs any more."""
        return not all(map(self._needs, self._shards.values()))

    @property
    def needs_any(self) -> bool:
        """Whether a shard lies in the store that somebody needs."""
        return any(map(self._needs, self._shards.values()))

    def begin(self, run: GroupAttempt) -> None:
        """The worker is asked to run a group."""
        self._runs.add(run)

    def end(self, run: GroupAttempt, shard_ids: Iterable[str]) -> None:
        """The worker has ended the run, and told what it sealed."""
        self._runs.remove(run)
        self._shards.update(dict.fromkeys(shard_ids, run))

    def expect(self, shards: Mapping[str, GroupAttempt]) -> None:
        """These shards are there, as the ledger says; `note_adopted` with what is there follows."""
        self._shards = dict(shards)

    def note_adopted(self, shard_ids: Iterable[str]) -> list[GroupAttempt]:
        """The worker was started again, or taken over, and holds these shards.

        Returns: the runs whose shards are gone. Unknown shards, of runs whose reply was lost, take
            room until they are swept.
        """
        held = set(shard_ids)
        lost = [run for shard_id, run in self._shards.items() if shard_id not in held]
        self._shards = {i: self._shards.get(i, _NOBODYS) for i in sorted(held)}
        return lost

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
            is_own, is_needed = life == incarnation, self._needs(run)
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
