"""The one sequence by which a version gets from the ranks of a trainer to whoever reads it.

    hold ──► seal ──► snapshot ──► record ──► advance ──► send ──► reader.adopt_weights
    no worker  the ranks'   of the   in the     the ranks   by the channel
    updates    weights      ranks    journal    are at it

Consumes: `publish`, one at a time. Waits for: updates of the version before, the ranks, the journal
of the reader, the channel. Unblocked by: those; a death of ranks repeats the sequence, see `ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal_sc.controller.train.model_place import PlaceFile
from areal_sc.controller.train.ranks import Ranks
from areal_sc.controller.train.train_step import TrainStep
from areal_sc.weights.channel import WeightsReader
from areal_sc.weights.published import WeightsReference
from areal_sc.workers.operations import Kind


@dataclass(eq=False)
class Publisher:
    """Publishes the versions of one model."""

    ranks: Ranks
    step: TrainStep
    place: PlaceFile

    async def publish(self, reader: WeightsReader, version: int) -> None:
        """Gives the reader the present version, or the next one, which it makes.

        Returns once the weights are sealed, broadcast or written; generation goes on.
        """
        await self.place.begin_to_publish()
        if version > self.ranks.state.version:
            await self.ranks.repeated(lambda: self._publish_next(reader, version))
        else:
            await self.ranks.repeated(lambda: self._publish_present(reader, version))

    async def _publish_next(self, reader: WeightsReader, version: int) -> None:
        ranks, step = self.ranks, self.ranks.step
        if ranks.state.version == version:
            return  # a repeat
        self.step.check(reader)
        weights = await self._seal(reader, version)
        await ranks.take_snapshot(version)  # ranks that broadcast do nothing else meanwhile
        self.ranks.note_reader(reader)
        await reader.record_version_async(version, step.trained_rows, step.splits)
        ranks.advance(version)  # a repeat is one from here on: `send` tells the reader at once
        await self.ranks.channel.send(weights, reader)

    async def _publish_present(self, reader: WeightsReader, version: int) -> None:
        weights = await self._seal(reader, version)
        self.ranks.note_reader(reader)
        await self.ranks.channel.send(weights, reader)

    async def _seal(self, reader: WeightsReader, version: int) -> WeightsReference:
        operation = self.ranks.operation(Kind.publish, str(version))
        with self.ranks.channel.times.adding_to("publish_hold_s"):
            oldest = await reader.updates.hold()
        return await self.ranks.channel.seal(operation, version, reader, oldest)
