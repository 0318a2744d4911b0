"""How a rank publishes its weights: sealed in its store, or as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

from areal_sc.engines.base import PublishesParts, SavesState, able
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.operations import digest
from areal_sc.workers.rank import Rank

_FOLDER_PREFIX: Final = "policy-"


async def seal_weights(rank: Rank, args: rank_methods.SealWeights) -> calls.SealedShard:
    """Seals a copy of what this rank holds of the parameters."""
    engine = able(rank.engine, PublishesParts)

    def put() -> str:
        unfilled, values = engine.published_parts()
        lengths = {name: [len(part)] for name, part in unfilled.items()}
        try:
            return rank.plane.store.put(unfilled, lengths, values=values)
        finally:
            for _ in values:  # other ranks may wait for this one's part in them
                pass

    async def seal() -> calls.SealedShard:
        # in the engine's thread: the event loop must not wait for gigabytes
        with rank.recorder.span("publishing weights", version=args.version):
            return rank.sealed(await rank.compute(put))

    return await rank.operations.join(args.operation, seal, next_version=args.version)


async def save_weights(rank: Rank, args: rank_methods.SaveWeights) -> rank_methods.SavedWeights:
    """Writes the weights to a folder of their policy below `weight_update.folder`."""
    engine, lineage = able(rank.engine, SavesState), args.operation.lineage
    root = rank.weights_root
    # other runs may have the same `weight_update.folder`
    prefix = f"{_FOLDER_PREFIX}{digest([args.run])}-"
    folder = root / f"{prefix}{lineage}-{args.version}"

    async def save() -> rank_methods.SavedWeights:
        if rank.number == 0:
            await asyncio.to_thread(remove_before, root, prefix, [lineage, args.oldest])
        with rank.recorder.span("publishing weights", version=args.version):
            written = await rank.compute(lambda: engine.begin_save_hf(folder, is_staged=False))
            await asyncio.wrap_future(written)
        return rank_methods.SavedWeights(str(folder), rank.plane.store.last_sequence)

    return await rank.operations.join(args.operation, save, next_version=args.version)


def remove_before(root: Path, prefix: str, oldest: list[int]) -> None:
    """Removes folders of the run's older policies; whoever reads one has been waited for."""
    for folder in root.glob(f"{prefix}*-*"):
        with suppress(ValueError):
            policy = [int(part) for part in folder.name.removeprefix(prefix).split("-")]
            if policy < oldest:
                shutil.rmtree(folder, ignore_errors=True)
