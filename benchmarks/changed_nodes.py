"""Nodes as of weight_nodes.py, whose trainers change a share of all values before each version.

Run as `python changed_nodes.py FOLDER`, a role of planes_role.py. Trainers seal bfloat16 weights by
the code of ranks; workers compare a checksum of each part with the one that the trainers have
written to the folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from planes_role import serve_async
from weight_nodes import NUM_PARAMETERS, Nodes, WeightWorker

from areal_sc.config.schema import ActorConfig, WeightUpdateConfig
from areal_sc.weights import methods
from areal_sc.weights.published import WeightsReference
from areal_sc.weights.rank_weights import RankWeights
from areal_sc.workers.operations import Operations
from areal_sc.workers.rank import Rank

WHOLE_EVERY_STEPS = 2
"""Versions come in turn by their changes, and whole."""


class ChangingWorker(WeightWorker):
    """Either kind of worker; of a rank it has what `RankWeights` asks for."""

    sums = Path()

    def __init__(self, *own: Any) -> None:
        super().__init__(*own)
        rng = np.random.default_rng(sum(self.name.encode()))
        is_rank = self.name.startswith("train/")
        self.bits = {
            f"parameter-{n}": rng.integers(0, 1 << 16, self._numel, np.uint16)
            for n in range(NUM_PARAMETERS * is_rank)
        }
        self._rng = rng
        self.operations = Operations(self.name)
        self.operations.lineage = 1
        self.engine, self.spec = self, self
        self.recorder = SimpleNamespace(span=lambda *_, **__: contextlib.nullcontext())
        update = WeightUpdateConfig(whole_every_steps=WHOLE_EVERY_STEPS)
        self.handle = SimpleNamespace(config=ActorConfig(weight_update=update))
        rank: Any = self
        self._gives = RankWeights(rank)

    def change(self, version: int, share: float) -> None:
        """This share of the values, in any places, becomes others."""
        for bits in self.bits.values():
            changed = self._rng.random(len(bits), np.float32) < share
            bits[changed] ^= self._rng.integers(1, 8, int(changed.sum()), np.uint16)
        rank = self.name.rpartition("/")[2]
        sums = [zlib.crc32(bits.data) for bits in self.bits.values()]
        (self.sums / f"{version}-{rank}.json").write_text(json.dumps(sums))

    def published_parts(self) -> tuple[dict[str, torch.Tensor], Iterator[torch.Tensor]]:
        parts = {n: torch.from_numpy(b).view(torch.bfloat16) for n, b in self.bits.items()}
        return {name: part.to("meta") for name, part in parts.items()}, iter(parts.values())

    async def compute(self, function: Callable[[], Any]) -> Any:
        return await asyncio.to_thread(function)

    sealed = Rank.sealed

    async def seal(self, args: methods.SealWeights) -> methods.SealedWeights:
        return await self._gives.seal(args)

    async def adopt_weights(self, weights: WeightsReference) -> None:
        expected = [
            json.loads((self.sums / f"{weights.version}-{rank}.json").read_text())
            for rank in range(self._num_ranks)
        ]
        for number, (name, values) in enumerate(await self._held.read(weights)):
            for rank, part in enumerate(values.view(torch.int16).split(self._numel)):
                if zlib.crc32(part.numpy().data) != expected[rank][number]:
                    raise ValueError(f"{name} arrived changed")
        self._held.keep_only(weights)


async def main(folder: Path) -> None:
    ChangingWorker.sums = folder
    async with contextlib.AsyncExitStack() as stack:
        nodes = Nodes(folder, stack, ChangingWorker)

        async def change(version: int, share: float) -> None:
            for worker in nodes.workers:
                worker.change(version, share)

        await serve_async(
            {"start": nodes.start, "served_bytes": nodes.served_bytes, "change": change}
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(Path(sys.argv[1])))
