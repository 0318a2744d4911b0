"""Weights that go by a Hugging Face folder, which trainers and generation see."""

from __future__ import annotations

from areal_sc.run.run_files import RunFiles
from areal_sc.weights import methods
from areal_sc.weights.channel import Channel, WeightsReader
from areal_sc.weights.published import WeightsReference
from areal_sc.workers import calls
from areal_sc.workers.operations import Operation


class DiskChannel(Channel):
    """`weight_update.method: disk`."""

    async def seal(
        self, operation: Operation, version: int, reader: WeightsReader, oldest: int
    ) -> WeightsReference:
        await self._forget_earlier()
        run = str(RunFiles(self._fleet.config.run_dir).path)
        with self.times.adding_to("publish_seal_s"):
            replies = await self._fleet.call_all(
                methods.SAVE_WEIGHTS, methods.SaveWeights(operation, version, oldest, run)
            )
            await self._sweep([calls.Sweep(r.last_sequence, adopted_live=()) for r in replies])
        return WeightsReference(version, folder=replies[0].folder, lineage=operation.lineage)
