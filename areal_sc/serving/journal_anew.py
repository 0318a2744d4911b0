"""The journal, written anew: what models have come to takes the place of what made them so."""

from __future__ import annotations

import asyncio
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from areal_sc.serving.hosts import RESTING, Host
from areal_sc.serving.journal import Known, Record, ServeJournal, Turn
from areal_sc.serving.rank_turns import RankTurns
from areal_sc.serving.samplers import Samplers
from areal_sc.serving.saved_weights import LOADED
from areal_sc.serving.trained_model import TrainedModel
from areal_sc.sources.row_file import GROWING


async def write_anew(
    journal: ServeJournal,
    host: Host,
    turns: RankTurns,
    models: Mapping[str, TrainedModel],
    samplers: Samplers,
    kept: Callable[[], Iterable[Record]],
) -> None:
    """Of adapters, while no request is at its turn.

    Args:
        kept: of the journal, what counts beside the models, asked for at the moment of writing.
    """
    if not host.has_snapshot:
        return  # what a death would lose is in the journal alone: another time
    await turns.rest_in_place()
    before = host.rows
    name = f"{GROWING}served-{secrets.token_hex(4)}.jsonl"
    host.rows = rows = before.beside(name)
    for model in list(models.values()):
        asked = [before.given(number) for number in model.asked]
        await asyncio.to_thread(rows.give, model.asked, asked)
    # with those that have begun meanwhile
    live = [model for model in models.values() if not model.is_ended]
    known = Known(host.version, name, [model.known() for model in live], samplers.by_name)
    # not beside requests that come: their records would go to the file before
    journal.begin_anew([known, *kept()])
    before.delete()
    await asyncio.to_thread(_delete_old_sources, live, samplers.saved.folder)


def moved(record: Record, behind: int) -> Record:
    """A record of turns by versions that are so many lower."""
    if isinstance(record, Turn | Known):
        return replace(record, version=record.version - behind)
    return record


def _delete_old_sources(live: Sequence[TrainedModel], folder: Path) -> None:
    needed = {folder / model.source.folder for model in live}
    for model in live:
        for kind in (RESTING, LOADED):
            for path in (folder / model.file_name).glob(f"{kind}-*"):
                if path not in needed:
                    shutil.rmtree(path, ignore_errors=True)
