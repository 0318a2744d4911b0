"""Sessions of agents outside that outlive their worker: their journals, and whose they are.

    an episode is claimed ──► a shard without rows, whose note names the session, and a journal
    the worker dies ──► its next life adopts the shard, and tells its note
                    ──► the group's next attempt, which only that worker gets, opens the session
    the episode is sealed, or nobody needs it ──► the journal goes, then the shard

So a journal comes and goes as a finished episode does: see `finished_episodes`. One whose shard is
swept goes with it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from msgspec import msgpack
from msgspec.structs import replace

from areal_sc.agents.claims import named_by
from areal_sc.agents.journal import SessionJournal
from areal_sc.errors import StoreFull, TransportError
from areal_sc.transport.shards.store import TensorStore
from areal_sc.workers.calls import REST, FinishedEpisode, GroupAttempt, HeldShard, RunGroup

logger = logging.getLogger(__name__)


class EpisodeSession:
    """The journal of one episode, if it has one.

    Attributes:
        journal: of an earlier life of the worker, or of the newest claim.
    """

    def __init__(
        self,
        folder: Path,
        store: TensorStore,
        note: FinishedEpisode,
        journal: SessionJournal | None,
    ) -> None:
        self.journal = journal
        self._folder = folder
        self._store = store
        self._note = note

    def begin(self, session_id: str) -> SessionJournal | None:
        """Begins a journal; None: there is no room. May be called on any thread."""
        note, shard_id = replace(self._note, session=session_id), ""
        try:
            shard_id = self._store.put({}, [], note=msgpack.encode(note))
            journal = SessionJournal(
                self._folder / session_id, lambda: self._store.remove(shard_id)
            )
            journal.begin()
        except (StoreFull, TransportError, OSError) as error:
            logger.warning("session %s will not outlive its worker: %s", session_id, error)
            if shard_id:
                self._store.remove(shard_id)
            return None
        self.journal = journal
        return journal

    def end(self) -> None:
        """The episode is sealed, or not needed. The shard of an earlier life is left to a sweep."""
        if self.journal:
            self.journal.end()
            self.journal = None


class KeptSessions:
    """The journals of all lives of one worker.

    Args:
        folder: where they are.
        worker, life: its name, and its incarnation.
    """

    def __init__(self, folder: Path, worker: str, life: str, store: TensorStore) -> None:
        self._folder = folder
        self._worker = worker
        self._life = life
        self._store = store

    def is_kept(self, session_id: str) -> bool:
        """Whether its journal is there."""
        return (self._folder / session_id).exists()

    def of_group(self, group: RunGroup) -> dict[int, EpisodeSession]:
        """Of each episode, by its number: with what an earlier life has left of it."""
        played = group.workflow, group.prompt
        left = {
            it.episode.number: SessionJournal(self._folder / it.episode.session)
            for it in group.kept
            if it.episode.session
            and (it.episode.workflow, it.episode.prompt) == played
            and it.shard.shard_id in self._store
        }
        run = GroupAttempt(group.group_id, group.attempt)
        return {
            number: EpisodeSession(
                self._folder,
                self._store,
                FinishedEpisode(run, number, workflow=group.workflow, prompt=group.prompt),
                left.get(number),
            )
            for number in range(group.group_size)
        }

    def checked(self, held: HeldShard) -> HeldShard:
        """A shard as it is told of: one whose journal is gone is of no episode."""
        episode = held.episode
        if episode is None or not episode.session or self.is_kept(episode.session):
            return held
        return HeldShard(held.shard_id, FinishedEpisode(episode.run, REST))

    def forget(self) -> None:
        """After a sweep: journals of earlier lives go whose shards are gone."""
        if not self._folder.exists():
            return
        left = [it for it in self._folder.iterdir() if self._is_of_earlier_life(it)]
        if left:
            notes = (msgpack.decode(it, type=FinishedEpisode) for it in self._notes)
            held = {note.session for note in notes}
            for path in left:
                if path.name not in held:
                    path.unlink(missing_ok=True)

    @property
    def _notes(self) -> list[bytes]:
        return [note for note in self._store.notes.values() if note]

    def _is_of_earlier_life(self, path: Path) -> bool:
        name = named_by(path.name)
        return name.worker == self._worker and name.life != self._life
