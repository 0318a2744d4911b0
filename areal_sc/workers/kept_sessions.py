"""Sessions of agents outside that outlive their worker: their journals, and whose they are.

    an episode is claimed ──► a shard without rows, whose note names the session, and a journal
    the worker dies ──► its next life adopts the shard, and tells its note
                    ──► the group's next attempt, which only that worker gets, opens the session
    the episode is sealed, or nobody needs it ──► the journal goes at once, the shard by a sweep

So a session comes and goes as a finished episode does: see `finished_episodes`.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from msgspec import msgpack
from msgspec.structs import replace

from areal_sc.agents.journal import SessionJournal
from areal_sc.errors import StoreFull, TransportError
from areal_sc.transport.shards.store import TensorStore
from areal_sc.workers.calls import REST, FinishedEpisode, GroupAttempt, HeldShard, RunGroup

logger = logging.getLogger(__name__)


class KeptSessions:
    """The journals of one worker's sessions, those of its earlier lives included.

    Args:
        folder: where they are.
    """

    def __init__(self, folder: Path, store: TensorStore) -> None:
        self._folder = folder
        self._store = store
        self._shards: dict[str, str] = {}  # by the session's id
        self._journals: dict[tuple[str, int], SessionJournal] = {}

    def is_kept(self, session_id: str) -> bool:
        """Whether its journal is there."""
        return (self._folder / session_id).exists()

    def begin(self, name: str, group: RunGroup) -> None:
        """A group begins, of this name: with the sessions that an earlier life has left of it.

        Those of another workflow or prompt are given up: their episodes are played anew.
        """
        run, prompt = GroupAttempt(group.group_id, group.attempt), group.prompt
        left = dict[int, Path]()
        for it in (it.episode for it in group.kept if it.shard.shard_id in self._store):
            if it.session and (it.workflow, it.prompt) == (group.workflow, prompt):
                left[it.number] = self._folder / it.session
            elif it.session:
                (self._folder / it.session).unlink(missing_ok=True)
        for number in range(group.group_size):
            note = FinishedEpisode(run, number, workflow=group.workflow, prompt=prompt)
            make = partial(self._make, note)
            self._journals[name, number] = SessionJournal(make, left.get(number))

    def journal(self, name: str, number: int) -> SessionJournal:
        """Of an episode of a group; nothing is written down if that has not begun here."""
        return self._journals.get((name, number)) or SessionJournal()

    def end(self, name: str, number: int, *, is_kept: bool = False) -> None:
        """The episode is sealed, or nobody needs it.

        Args: is_kept: neither, but this life of the worker ends.
        """
        journal = self._journals.pop((name, number), None)
        if journal and not is_kept:
            journal.end()

    def checked(self, held: HeldShard) -> HeldShard:
        """A shard as it is told of: one whose journal is gone is of no episode."""
        if held.episode is None or not held.episode.session:
            return held
        self._shards[held.episode.session] = held.shard_id
        if self.is_kept(held.episode.session):
            return held
        return HeldShard(held.shard_id, FinishedEpisode(held.episode.run, REST))

    def forget(self) -> None:
        """After a sweep: journals go whose shards are gone, and shards whose journals are."""
        for session_id, shard_id in self._shards.copy().items():
            if shard_id not in self._store or not self.is_kept(session_id):
                del self._shards[session_id]
                self._store.remove(shard_id)
                (self._folder / session_id).unlink(missing_ok=True)

    def _make(self, note: FinishedEpisode, session_id: str) -> Path | None:
        """The shard and the file; None: there is no room. May be called on any thread."""
        path = self._folder / session_id
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            named = msgpack.encode(replace(note, session=session_id))
            shard_id = self._store.put({}, [], note=named)
            path.touch(0o600)
            self._shards[session_id] = shard_id
        except (StoreFull, TransportError, OSError) as error:
            logger.warning("session %s will not outlive its worker: %s", session_id, error)
            return None
        return path
