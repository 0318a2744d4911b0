"""How a rank publishes its weights: sealed in its store, or as a Hugging Face folder."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Final

import torch

from areal_sc.engines.base import PublishesParts, SavesState, able
from areal_sc.weights import WeightChanges
from areal_sc.workers import calls, rank_methods
from areal_sc.workers.operations import digest
from areal_sc.workers.rank import Published, Rank
from areal_sc.workers.weight_changes import seal_changes

_FOLDER_PREFIX: Final = "policy-"


async def seal_weights(rank: Rank, args: rank_methods.SealWeights) -> calls.SealedWeights:
    """Seals a copy of what this rank holds of the parameters, and what has changed in them."""
    engine, store, before = able(rank.engine, PublishesParts), rank.plane.store, rank.published
    update, lineage = rank.handle.config.weight_update, args.operation.lineage

    def put() -> str:
        unfilled, values = engine.published_parts()
        lengths = {name: [len(part)] for name, part in unfilled.items()}
        try:
            return store.put(unfilled, lengths, values=values)
        finally:
            for _ in values:  # other ranks may wait for this one's part in them
                pass

    def put_changes(whole: str) -> str:
        is_due = update.has_changes and args.version % update.whole_every_steps > 0
        if before is None or not is_due or before.whole not in store:
            return ""
        return seal_changes(store, before.whole, whole, torch.get_num_threads())

    async def seal() -> calls.SealedWeights:
        if before is not None and before.changes:  # everybody has what they were read for
            store.remove(before.changes)
        # in the engine's thread: the event loop must not wait for gigabytes
        with rank.recorder.span("publishing weights", version=args.version):
            whole = await rank.compute(put)
            changes = await rank.compute(lambda: put_changes(whole))
        rank.published = Published((lineage, args.version), whole, changes)
        sealed = rank.sealed(whole)
        changed = None
        if before is not None and changes:
            shards = (rank.sealed(changes).shard,)
            changed = WeightChanges(before.policy, shards, store.bytes_of(changes))
        num_bytes = store.bytes_of(whole)
        return calls.SealedWeights(sealed.shard, sealed.last_sequence, num_bytes, changed)

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
