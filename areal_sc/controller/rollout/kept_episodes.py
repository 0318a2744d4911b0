"""Finished episodes of groups whose attempt was lost: where they are, for the next attempt.

    the next life of a worker tells what it holds ──► kept, if their group is queued or runs
                                                        │
    the group's next attempt waits for that,            ├──► given to an attempt
    and prefers the worker that has them                └──► swept, when the group has ended

Their shards take the room of one group in the store that they lie in, under the run number `KEPT`.
An attempt that runs there takes that room over; one that runs elsewhere leaves it as it is until
the group has ended, since its own worker may die as well. The same holds for a script that takes
workers over. Groups outside of training have no kept episodes: another start gives their ids again.

Pure state: nothing here waits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from areal_sc.weights.published import ShardReference
from areal_sc.workers.calls import REST, GroupAttempt, HeldShard, KeptEpisode

KEPT: Final = -1
"""In place of an attempt: the shards are for whichever comes next."""
NOBODYS: Final = -2
"""In place of an attempt: the shards are for none."""


class KeptEpisodes:
    """The finished episodes of open groups, by group and number.

    Attributes:
        is_open, open_groups: whether a group is queued or runs, and all that are or do; set by
            whoever has the groups.
    """

    def __init__(self) -> None:
        self.is_open: Callable[[int], bool] = lambda group_id: False
        self.open_groups: Callable[[], tuple[int, ...]] = tuple
        self._kept: dict[int, dict[int, KeptEpisode]] = {}
        self._lost_with: dict[int, tuple[str, ...]] = {}

    def needs(self, run: GroupAttempt) -> bool:
        """Whether shards that are held for this run are kept episodes of an open group."""
        return run.attempt == KEPT and run.group_id in self._kept and self.is_open(run.group_id)

    def of_group(self, group_id: int) -> tuple[KeptEpisode, ...]:
        """All that its next attempt need not play."""
        return tuple(self._kept.get(group_id, {}).values())

    def homes(self, group_id: int, *, of_sessions: bool = False) -> Counter[str]:
        """The workers that hold some of them, each with how many.

        Args: of_sessions: those alone whose memory has sessions of it, which go on nowhere else.
        """
        kept = self.of_group(group_id)
        return Counter(it.shard.node_id for it in kept if it.episode.session or not of_sessions)

    @property
    def group_ids(self) -> list[int]:
        """Open groups with kept episodes."""
        return list(filter(self.is_open, self._kept))

    def note_lost(self, group_id: int, *workers: str) -> None:
        """Workers were lost that may have finished episodes of a group."""
        self._lost_with[group_id] = workers

    def lost_with(self, group_id: int) -> tuple[str, ...]:
        """The workers that are to tell what is left of the attempts before."""
        return self._lost_with.get(group_id, ())

    def is_awaited(self, worker: str) -> bool:
        """Whether this worker is to tell what is left of an attempt of an open group."""
        return any(worker in its for group, its in self._lost_with.items() if self.is_open(group))

    def note_held(
        self, worker: str, address: str, held: Iterable[HeldShard]
    ) -> dict[str, GroupAttempt | None]:
        """A worker tells what it holds, in place of what it has told before.

        Returns: what each shard is held for, by its id, unless a reply has told of it.
        """
        for group_id in list(self._kept):
            its = self._kept[group_id]
            left = {number: it for number, it in its.items() if it.shard.node_id != worker}
            self._set(group_id, left if self.is_open(group_id) else {})
        runs: dict[str, GroupAttempt | None] = {}
        for it in held:
            runs[it.shard_id] = None
            if it.episode is None:
                continue
            group_id = it.episode.run.group_id
            runs[it.shard_id] = GroupAttempt(group_id, NOBODYS)
            known = self._kept.get(group_id, {}).get(it.episode.number)
            is_new = it.episode.number != REST and (known is None or bool(known.episode.session))
            if self.is_open(group_id) and is_new:
                shard = ShardReference(worker, address, it.shard_id)
                its = self._kept.setdefault(group_id, {})
                its[it.episode.number] = KeptEpisode(shard, it.episode)
                runs[it.shard_id] = GroupAttempt(group_id, KEPT)
        return runs

    def give_up(self, worker: str, num_groups: int) -> dict[str, GroupAttempt]:
        """Its store holds too many groups: what it has of the youngest ones plays again.

        Returns: what shards there are held for now, by their ids.
        """
        at_worker = [it for it in sorted(self._kept) if worker in self.homes(it)]
        given_up: dict[str, GroupAttempt] = {}
        for group_id in at_worker[max(len(at_worker) - num_groups, 0) :]:
            nobodys = GroupAttempt(group_id, NOBODYS)
            given_up |= dict.fromkeys(self.hand_over(group_id, worker), nobodys)
        return given_up

    def hand_over(self, group_id: int, worker: str) -> list[str]:
        """An attempt begins on a worker: the ids of the shards there, which are its own now."""
        its = self._kept.get(group_id, {})
        taken = [it.shard.shard_id for it in its.values() if it.shard.node_id == worker]
        left = {number: it for number, it in its.items() if it.shard.node_id != worker}
        self._set(group_id, left)
        self._lost_with.pop(group_id, None)
        return taken

    def forget(self, group_id: int) -> None:
        """The group has ended."""
        self._set(group_id, {})
        self._lost_with.pop(group_id, None)

    def _set(self, group_id: int, its: dict[int, KeptEpisode]) -> None:
        if its:
            self._kept[group_id] = its
        else:
            self._kept.pop(group_id, None)
