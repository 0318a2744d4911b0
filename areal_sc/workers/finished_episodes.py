"""Finished episodes are durable: whatever dies, what has ended is not played again.

    an episode ends ──► its rows are sealed, as a shard of their own, with a note ──► the group is
           └── groups are quick, and this one is complete: one shard for all ─────►   complete
    the worker dies ──► its next life adopts the shards, and tells their notes
                    ──► the group's next attempt is given those that are there, plays the missing
                        numbers, and replies with all of them

The episode is the unit of durability. The note (`FinishedEpisode`) says what a controller knows of
the rows, or why there are none, so shard and note come and go as one. They lie in shared memory,
which outlives the worker and the script, and goes with its machine. Without shared memory nothing
outlives the worker.

Who knows what:

- The controller alone decides which shards an attempt takes over (`RunGroup.kept`): those of groups
  that are queued or run, each number once. So an attempt that nobody needs, or that was given up,
  adds nothing to a later one. See `controller/rollout/kept_episodes.py`.
- An attempt prefers the worker whose store has the shards, which stay where they are. Elsewhere it
  pulls the rows and seals a copy: all rows of a finished group lie in one store. What cannot be had
  any more is played again.
- A reply names the shards of all episodes with rows. Rows count as those of the attempt that
  replies: their versions are at least the group's admission version, whoever sampled them.
- A run that is given up drops what it has sealed, since no reply will tell of it. One whose engine
  fails keeps it: the worker ends, and its next life tells.
- To seal an episode alone costs as much as a whole group. Where the last `NUM_QUICK` groups of a
  worker's life were complete within `SEAL_AFTER_S` of their first episode's end, an episode of less
  than `LONG_S` waits so long for the others, and a complete group is one shard. So a kill costs
  such a group two seconds, and no other one anything.
- A rejected episode has ended, too: its shard has the note alone, and goes with the run's end.
- What all rows of a group share lies in a shard of its own, under the number `SHARED`, which is
  sealed with the group's first episode that has rows. Without it kept episodes play again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from msgspec import msgpack

from areal_sc.errors import MetadataError, StoreFull, TransportError
from areal_sc.metadata import BatchMetadata, RowRun, ShardMetadata, runs_of
from areal_sc.rejection import Rejection
from areal_sc.system.waiting import all_of
from areal_sc.token_fields import Declared
from areal_sc.transport.plane import DataPlane
from areal_sc.weights.published import ShardReference
from areal_sc.workers import calls, group_rows
from areal_sc.workers.group_judging import Episode

logger = logging.getLogger(__name__)


LONG_S: Final = 10.0
SEAL_AFTER_S: Final = 2.0
"""Where groups are quick, an episode is sealed so much after its end; at once if it was long."""
NUM_QUICK: Final = 16
"""Groups in a row that were complete within that time make a worker's groups quick."""


@dataclass(frozen=True)
class EndedEpisode:
    """An episode of a group, before the group is complete.

    Attributes:
        outcome: its rows, or why it has none.
        shard_id: in the worker's own store; "" if nothing of it is there.
        shared_id: of the shard there with what its group shares; "" if there is none.
        is_taken_over: an earlier attempt has played it.
    """

    outcome: Episode | Rejection
    shard_id: str = ""
    shared_id: str = ""
    is_taken_over: bool = False


class FinishedEpisodes:
    """Seals the episodes of one worker as they end, and takes over those of earlier attempts.

    Args:
        name: of the worker.
        address: of its store; known once it serves.
    """

    def __init__(self, name: str, address: Callable[[], str], plane: DataPlane) -> None:
        self._name = name
        self._address = address
        self._plane = plane

    def seal(
        self,
        group: calls.RunGroup,
        number: int,
        outcome: Episode | Rejection,
        declared: Declared,
        *,
        shared_id: str = "",
    ) -> EndedEpisode:
        """Makes the end of an episode durable.

        Args:
            declared: the workflow's own fields.
            shared_id: what the group shares is in this shard already.
        Raises: StoreFull: there is no room.
        """
        rows = [] if isinstance(outcome, Rejection) else outcome
        note = calls.FinishedEpisode(
            run=calls.GroupAttempt(group.group_id, group.attempt),
            number=number,
            rows=group_rows.metadata_of(group, {number: rows}),
            metrics=tuple({name: float(it) for name, it in row.metrics.items()} for row in rows),
            rejection=outcome if isinstance(outcome, Rejection) else None,
            answer=(rows[-1].answer if rows else "").encode(errors="replace").decode(),
            vote=rows[-1].vote if rows else None,
            workflow=group.workflow,
            prompt=group.prompt,
        )
        shared_id = shared_id or self._seal_shared(group, rows, declared)
        shard_id = self._put(group_rows.values_of(rows, declared), note)
        return EndedEpisode(outcome, shard_id, shared_id)

    def _put(self, values: Mapping[str, list[Any]], note: calls.FinishedEpisode) -> str:
        """The id of a new shard with what `values_of` gives; with the note alone if it has none."""
        fields = {
            name: torch.from_numpy(np.concatenate(its)) for name, its in values.items() if its
        }
        lengths = {name: tuple(map(len, its)) for name, its in values.items()}
        return self._plane.store.put(fields, lengths, note=msgpack.encode(note))

    def _seal_shared(self, group: calls.RunGroup, rows: Episode, declared: Declared) -> str:
        """The id of a new shard of what these rows share with all of the group; "": nothing."""
        values = group_rows.values_of(rows[:1], declared, are_shared=True)
        if not (rows and values):
            return ""
        run = calls.GroupAttempt(group.group_id, group.attempt)
        note = calls.FinishedEpisode(
            run, calls.SHARED, workflow=group.workflow, prompt=group.prompt
        )
        return self._put(values, note)

    async def take_over(
        self, group: calls.RunGroup, declared: Declared, ended: dict[int, EndedEpisode]
    ) -> None:
        """Adds the kept episodes of a group that can be had, by their numbers.

        Raises: StoreFull: there is no room for a copy.
        """
        played = group.workflow, group.prompt
        ended_ones = (it for it in group.kept if not it.episode.session)
        fitting = [it for it in ended_ones if (it.episode.workflow, it.episode.prompt) == played]
        shared = [it.shard for it in fitting if it.episode.number == calls.SHARED]
        fitting = [it for it in fitting if it.episode.number != calls.SHARED]
        outcomes = await all_of(self._outcome(it, declared, shared) for it in fitting)
        # a value of which no row is left is nobody's: those that play again give theirs
        rows = next((it for it in outcomes if isinstance(it, list)), [])
        held = [it.shard_id for it in shared if rows and it.shard_id in self._plane.store]
        shared_id = held[0] if held else self._seal_shared(group, rows, declared)
        for kept, outcome in zip(fitting, outcomes, strict=True):
            if outcome is None:
                continue
            number, shard_id = kept.episode.number, kept.shard.shard_id
            if shard_id in self._plane.store:
                ended[number] = EndedEpisode(outcome, shard_id, shared_id, is_taken_over=True)
                continue
            ended[number] = self.seal(group, number, outcome, declared, shared_id=shared_id)

    async def _outcome(
        self, kept: calls.KeptEpisode, declared: Declared, shared: Sequence[ShardReference]
    ) -> Episode | Rejection | None:
        """What a kept episode came to; None: that cannot be had, and it plays again."""
        try:
            return kept.episode.rejection or await self._pull_rows(kept, declared, shared)
        except (TransportError, MetadataError) as error:
            run = kept.episode.run
            logger.warning(
                "group=%d episode=%d plays again: %s", run.group_id, kept.episode.number, error
            )
            return None

    def batch_of(
        self,
        group: calls.RunGroup,
        ended: Mapping[int, EndedEpisode],
        declared: Declared,
    ) -> BatchMetadata | None:
        """The rows of a complete group, whose shards of rejected episodes go; None: it has none.

        Raises: StoreFull: there is no room for what was not sealed before.
        """
        kept = {
            number: it.outcome
            for number, it in sorted(ended.items())
            if not isinstance(it.outcome, Rejection)
        }
        rejected = (it for it in ended.values() if isinstance(it.outcome, Rejection))
        self.drop(replace(it, shared_id="") if kept else it for it in rejected)
        if not kept:
            return None
        rest = [row for number, rows in kept.items() if not ended[number].shard_id for row in rows]
        note = calls.FinishedEpisode(calls.GroupAttempt(group.group_id, group.attempt), calls.REST)
        rest_id = self._put(group_rows.values_of(rest, declared), note) if rest else ""
        shared_id = next((it.shared_id for it in ended.values() if it.shared_id), "")
        shared_id = shared_id or self._seal_shared(group, rest, declared)
        # of each shard's rows: where they are in the batch, and in the shard
        places: dict[str, list[tuple[int, int]]] = {}
        each = (ended[number].shard_id or rest_id for number, rows in kept.items() for _ in rows)
        for row, shard_id in enumerate(each):
            of_shard = places.setdefault(shard_id, [])
            of_shard.append((row, len(of_shard)))
        shards = [
            ShardMetadata(self._name, self._address(), shard_id, runs_of(its))
            for shard_id, its in places.items()
        ]
        run = RowRun(0, 0, sum(map(len, kept.values())))
        shared = ShardMetadata(self._name, self._address(), shared_id, (run,))
        return BatchMetadata(
            f"g{group.group_id}.{group.attempt}",
            group.admitted_version,
            group_rows.columns_of(declared, tuple(shards), shared if shared_id else None),
            group_rows.metadata_of(group, kept),
        )

    def drop(self, ended: Iterable[EndedEpisode]) -> None:
        """Forgets shards of this run, of which no reply tells."""
        own = [episode for episode in ended if not episode.is_taken_over]
        for shard_id in {it for episode in own for it in (episode.shard_id, episode.shared_id)}:
            if shard_id:
                self._plane.store.remove(shard_id)

    async def _pull_rows(
        self, kept: calls.KeptEpisode, declared: Declared, shared: Sequence[ShardReference]
    ) -> Episode:
        """Raises: TransportError, MetadataError: its rows, or what they share, cannot be had."""
        shard, episode = kept.shard, kept.episode
        run = RowRun(0, 0, len(episode.rows))
        where = ShardMetadata(shard.node_id, shard.node_addr, shard.shard_id, (run,))
        if not shared and any(field.per_group for field in declared.values()):
            raise MetadataError("what its group shares is gone")
        of_group = ShardMetadata(*shared[0], (run,)) if shared else None
        columns = group_rows.columns_of(declared, (where,), of_group)
        batch = BatchMetadata("kept", episode.rows[0].admitted_version, columns, episode.rows)
        rows = group_rows.rows_of(await self._plane.puller.pull(batch), episode.metrics, declared)
        answer = ""  # as its tokens have it, if its worker is another one
        if own := self._plane.store.notes.get(shard.shard_id):
            answer = msgpack.decode(own, type=calls.FinishedEpisode).answer
        rows[-1] = replace(rows[-1], answer=answer, vote=episode.vote)
        return rows


class EndingGroup:
    """The episodes of a group until all have ended: each is sealed at its end, or soon after.

    Args:
        declared: the workflow's own fields.
        is_quick: the last groups of this worker were, see `NUM_QUICK`.
        seals_last: the last one is sealed, too, since its group is judged first.
        note_sealed: is told the number of each that is sealed.

    Attributes:
        ended: by their numbers.
        ends_s: of those that were played here, by the event loop's time.
    """

    def __init__(
        self,
        finished: FinishedEpisodes,
        group: calls.RunGroup,
        declared: Declared,
        *,
        is_quick: bool,
        seals_last: bool,
        note_sealed: Callable[[int], None],
    ) -> None:
        self.ended: dict[int, EndedEpisode] = {}
        self.ends_s: list[float] = []
        self._finished = finished
        self._group = group
        self._declared = declared
        self._is_quick = is_quick
        self._seals_last = seals_last
        self._note_sealed = note_sealed
        self._timers: list[asyncio.TimerHandle] = []

    def problem_of_shared(self, outcome: Episode | Rejection) -> str:
        """Which value an episode does not share with those before it; "": it shares all."""
        if isinstance(outcome, Rejection):
            return ""
        before = (it.outcome for it in self.ended.values() if isinstance(it.outcome, list))
        return group_rows.problem_of_shared(outcome, next(before, []), self._declared)

    def add(self, number: int, outcome: Episode | Rejection, took_s: float) -> None:
        """An episode has ended. Of groups outside of training none is sealed."""
        loop = asyncio.get_running_loop()
        self.ended[number] = EndedEpisode(outcome)
        self.ends_s.append(loop.time())
        is_last = len(self.ended) == self._group.group_size and not self._seals_last
        if is_last or self._group.group_id < 0:
            return
        if self._is_quick and took_s < LONG_S:
            self._timers.append(loop.call_later(SEAL_AFTER_S, self._seal, number))
        else:
            self._seal(number)

    def close(self, *, is_lost: bool) -> None:
        """Nothing is sealed any more. Args: is_lost: the worker's next life tells of those here."""
        for timer in self._timers:
            timer.cancel()
        for number in self.ended if is_lost and self._group.group_id >= 0 else ():
            self._seal(number)

    def _seal(self, number: int) -> None:
        if self.ended[number].shard_id:
            return
        outcome = self.ended[number].outcome
        shared_id = next((it.shared_id for it in self.ended.values() if it.shared_id), "")
        with suppress(StoreFull):  # it is tried again with the others
            self.ended[number] = self._finished.seal(
                self._group, number, outcome, self._declared, shared_id=shared_id
            )
            self._note_sealed(number)
